"""What single tokens stand for: the bytes each one contributes to the text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

MAX_KEPT_TEXTS = 4096
"""Most texts of tokens that are remembered: those in use come back at once, and a server's memory does not grow with
every token it has ever seen."""

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte each character of a byte-level vocabulary stands for (GPT-2's printable stand-ins).

    Bytes that are printable Latin-1 characters stand for themselves, the others for U+0100 onwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    hidden = sorted(set(range(256)) - set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


_ALPHABET = _byte_alphabet()


class TokenPieces:
    """Token spellings of one tokenizer, and the family its `decoder` (as in tokenizer.json) belongs to."""

    def __init__(self, backend: Backend, decoder: dict[str, Any] | None) -> None:
        self._backend = backend
        kinds = set(_kinds(decoder))
        self.is_byte_level = "ByteLevel" in kinds and kinds <= {"Sequence", "ByteLevel", "Fuse"}
        """Text is the tokens' bytes joined and read as UTF-8, nothing else."""
        self.has_byte_level = "ByteLevel" in kinds
        """Pieces are spelled in the byte alphabet."""
        self._has_fallback = "ByteFallback" in kinds
        self._has_spaces = bool(kinds & {"Metaspace", "Replace"})
        self._texts: dict[int, str | None] = {}

    def exists(self, token_id: int) -> bool:
        """Whether the id names a token."""
        return self._backend.id_to_token(token_id) is not None

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the token is one byte of a character the vocabulary lacks."""
        return self._has_fallback and _BYTE_FALLBACK.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def text_of(self, token_id: int) -> str | None:
        """Return what the token says wherever it stands: the text of its bytes; None if they are not whole characters.

        Only for byte-level tokenizers. Remembered, for it is asked of every token that is generated.
        """
        assert self.is_byte_level
        try:
            return self._texts[token_id]
        except KeyError:
            pass
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        if len(self._texts) >= MAX_KEPT_TEXTS:
            self._texts.clear()
        self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes the token contributes inside a text; possibly part of a character, empty for no token."""
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.has_byte_level:
            values = [_ALPHABET.get(char) for char in piece]
            # An added token may be spelled with characters outside the alphabet; then it stands for itself.
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        fallback = _BYTE_FALLBACK.fullmatch(piece) if self._has_fallback else None
        if fallback is not None:
            return bytes([int(fallback[1], 16)])
        return (piece.replace("▁", " ") if self._has_spaces else piece).encode()


def _kinds(decoder: dict[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)
