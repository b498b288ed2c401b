"""Token ids to text, increment by increment: the increments joined are exactly the one-shot decoding."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from optimc_runtime.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    For any way of cutting `ids` into increments, the results of `push` followed by `flush` join to
    `tokenizer.decode(ids, skip_special_tokens=...)`. No result of `push` ends inside a character: an unfinished one
    is held until its bytes arrive, and becomes U+FFFD only when they turn out invalid or `flush` ends the text.
    Cost is linear in the number of tokens.
    """

    __slots__ = ("_skipped", "_stream")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _Stream = _ByteStream(tokenizer) if tokenizer.pieces.is_byte_level else _WindowStream(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is now certain."""
        return "".join(map(self.push_token, ids))

    def push_token(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        return "" if token_id in self._skipped else self._stream.push(token_id)

    def flush(self) -> str:
        """Return the text still held; the sequence has ended."""
        return self._stream.flush()


class _Stream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Byte-level vocabularies: the text is the tokens' bytes as UTF-8, each maximal invalid part one U+FFFD."""

    __slots__ = ("_inside_character", "_pieces", "_utf8")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._inside_character = False

    def push(self, token_id: int) -> str:
        # Nearly every token begins and ends between characters.
        if not self._inside_character and (text := self._pieces.text_of(token_id)) is not None:
            return text
        text = self._utf8.decode(self._pieces.bytes_of(token_id))
        self._inside_character = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """All other decoders: what the last tokens add is the decoding with them minus the decoding without.

    One settled token is kept in front as context, so that rules about the first token of a text (a stripped leading
    space) meet the context on both sides of the subtraction. Tokens whose text still depends on their successors are
    pending: a run of byte-fallback tokens is characters only if the whole run is valid UTF-8, and U+FFFD per token
    otherwise, and the bytes of a byte-level piece may end inside a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._pieces.exists(token_id):
            return ""
        self._pending.append(token_id)
        return "" if self._is_open(token_id) else self._settle()

    def flush(self) -> str:
        return self._settle()

    def _is_open(self, token_id: int) -> bool:
        if self._pieces.is_fallback_byte(token_id):
            return True
        if not self._pieces.has_byte_level:
            return False
        self._utf8.decode(self._pieces.bytes_of(token_id))
        return bool(self._utf8.getstate()[0])

    def _settle(self) -> str:
        if not self._pending:
            return ""
        text = self._decode(self._context + self._pending)
        added = text[len(self._context_text) :]
        self._context = self._pending[-1:]
        self._context_text = self._decode(self._context)
        self._pending = []
        return added

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
