"""From a grammar's text to something that says what may follow, token by token."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from optimc.errors import RequestError
from optimc_runtime.structured.grammar import Grammar, next_mask, reason_of
from optimc_runtime.structured.grammar_spec import ONE_SPELLING, GrammarSpec
from optimc_runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMARS = 64
"""Compiled ones kept, those used last."""

MAX_TEXT_BYTES = 64 << 10
MAX_REGEX_BYTES = 8 << 10


_HEADER = '%llguidance {"no_forcing": true}\n'
"""Not to look ahead for text that is certain: where a grammar leaves one token for ever, as `/a+/ /a+/ "x"` does, that
never ends."""

_OPTIONS = re.compile(r"%\s*llguidance")

MAX_JOINED_PATTERNS = 8
"""Patterns in a grammar whose schemas may ask for several of them at once. llguidance's words for a conflict it cannot
settle double with every pattern: 12 took 0.6 s, 20 more than anyone waits."""

MAX_MULTIPLE = 10_000
"""Of `multipleOf`, or of all of them that are joined: there is a state for every remainder."""

MAX_AMPERSANDS = 6
"""In a Lark grammar, where & joins expressions that must match at once: every one may multiply the work."""

_JOINS = re.compile(r'"(?:allOf|\$ref|[^"]*\\u[^"]*)"\s*:')
_PATTERN = re.compile(r'"(?:pattern|format|[^"]*\\u[^"]*)"\s*:')
"""An escaped key may be any."""
_MULTIPLE = re.compile(r'"(?:multipleOf|[^"]*\\u[^"]*)"\s*:\s*([0-9][0-9.eE+-]*)')


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

    limit = MAX_REGEX_BYTES if spec.kind == "regex" else MAX_TEXT_BYTES
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > limit:
        raise _invalid(spec, f"{size:,} bytes; at most {limit:,} are taken")
    try:
        grammar = _HEADER + _rules(spec)
        _check_schemas(grammar)
    except ValueError as error:  # no JSON, or text that is no Unicode
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


def _rules(spec: GrammarSpec) -> str:
    """Return the grammar in Lark. Raises ValueError if its text cannot be that of its kind."""
    import llguidance

    if spec.kind == "regex":
        if _ends_in_escape(spec.text):
            raise ValueError("the expression ends in a backslash, which stands for nothing; double it to mean one")
        return f"start: /{llguidance.regex_to_lark(spec.text, '')}/"
    if spec.kind == "lark":
        if _OPTIONS.search(spec.text):
            raise ValueError("options of llguidance are not for the request to set")
        if spec.text.count("&") > MAX_AMPERSANDS:
            raise ValueError(
                f"the character & stands in it {spec.text.count('&')} times; at most {MAX_AMPERSANDS} are taken"
            )
        return spec.text
    schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return f"start: %json {json.dumps({**schema, 'x-guidance': ONE_SPELLING})}"


def _check_schemas(grammar: str) -> None:
    """Raise ValueError for what llguidance would work on for ever."""
    is_joined = _JOINS.search(grammar) is not None
    count = len(_PATTERN.findall(grammar))
    if is_joined and count > MAX_JOINED_PATTERNS:
        raise ValueError(
            f"{count} patterns and formats in schemas that are joined by allOf or $ref; at most {MAX_JOINED_PATTERNS} "
            "are taken"
        )
    factors = {_factor(value) for value in _MULTIPLE.findall(grammar)}
    largest = math.prod(factors) if is_joined else max(factors, default=1)
    if largest > MAX_MULTIPLE:
        raise ValueError(f"multipleOf asks for multiples of {largest} (zeros aside); at most {MAX_MULTIPLE:,} is taken")


def _factor(number: str) -> int:
    """Return the digits of a JSON number, without the zeros at its ends: every one of 3, 0.3 and 300 is 3."""
    digits = number.lower().partition("e")[0].replace(".", "").strip("0")
    return int(digits[:18] or "1")


def _ends_in_escape(regex: str) -> bool:
    """Whether the slash that ends an expression in Lark would belong to its last character."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def _invalid(spec: GrammarSpec, reason: str) -> RequestError:
    return RequestError(f"{spec.param}: {reason}", param=spec.param, code="invalid_grammar")
