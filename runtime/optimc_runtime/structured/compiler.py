"""From a grammar's text to something that says what may follow, token by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from optimc.errors import RequestError
from optimc_runtime.structured.grammar import Grammar, next_mask, reason_of
from optimc_runtime.structured.grammar_spec import GrammarSpec
from optimc_runtime.structured.lark import lark_of
from optimc_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMARS = 64
"""Compiled ones kept, those used last."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Any thread may call it; compiling takes milliseconds, the first time
    longer, for the vocabulary is prepared then."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._grammars: OrderedDict[GrammarSpec, Grammar] = OrderedDict()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the compiled grammar. Raises RequestError (code "invalid_grammar") in llguidance's words, with
        `spec.param`, if it is wrong, too large, or lets nothing be said."""
        with self._lock:
            known = self._grammars.get(spec)
            if known is not None:
                self._grammars.move_to_end(spec)
                return known
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        grammar = _compiled(spec, self._vocabulary, self._vocab_size)
        with self._lock:
            self._grammars[spec] = grammar
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


class _Words:
    """The vocabulary as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.tokens = [tokenizer.pieces.bytes_of(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        if not eos_ids:
            # It insists on one; this one's bit is beyond every mask.
            self.tokens.append(b"<eos>")
            self.special_token_ids.append(vocab_size)
        self.eos_token_id = eos_ids[0] if eos_ids else vocab_size
        self.bos_token_id = None
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    import llguidance

    words = _Words(tokenizer, vocab_size, eos_ids)
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(words), n_vocab=len(words.tokens), eos_token=list(eos_ids) or [words.eos_token_id]
    )


def _compiled(spec: GrammarSpec, vocabulary: LLTokenizer, vocab_size: int) -> Grammar:
    import llguidance

    try:
        grammar = lark_of(spec)
    except ValueError as error:
        raise _invalid(spec, str(error)) from None
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=5_000,
        max_grammar_size=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    # The first mask is the dearest, and it shows a grammar that lets nothing be said.
    reason = reason_of(matcher) if matcher.is_error() else next_mask(matcher)[1]
    if reason:
        raise _invalid(spec, reason)
    return Grammar(matcher, vocab_size, spec.param)


def _invalid(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.param}: {reason}", param=spec.param, code="invalid_grammar")
