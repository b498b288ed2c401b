"""Log-probabilities in the two shapes of the API. One entry per token, the stop token included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimc_runtime.request import TokenLogprob
from optimc_runtime.server.client import TextTokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_text(tokenizer: TextTokenizer | None, token_id: int) -> tuple[str, list[int] | None]:
    """Return a token's name and its UTF-8 bytes.

    The name is its text; `bytes:\\xe2\\x80` for part of a character, as the API writes it; `token_id:N` without
    tokenizer, and for ids that are no token. So names differ where tokens do.
    """
    data = b"" if tokenizer is None else tokenizer.pieces.bytes_of(token_id)
    if not data:
        return f"token_id:{token_id}", None
    try:
        return data.decode(), list(data)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)


def chat_logprobs(tokenizer: TextTokenizer | None, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice or delta."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        name, data = token_text(tokenizer, token_id)
        return {"token": name, "logprob": max(logprob, FLOOR), "bytes": data}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds the `logprobs` objects of one completion choice; `text_offset` runs on from chunk to chunk.

    Offsets count characters of the concatenated `tokens`, which is the text where every token has its own.
    """

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def take(self, tokens: Sequence[TokenLogprob], *, unpredicted: int | None = None) -> dict[str, Any]:
        """Return the object for the next `tokens`. `top_logprobs` holds the chosen token even if it is not likely.

        `unpredicted` is a token in front of them that nothing precedes: it has a null for each figure.
        """
        said: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if unpredicted is not None:
            self._add(said, unpredicted)
            said["token_logprobs"].append(None)
            said["top_logprobs"].append(None)
        for token in tokens:
            text = self._add(said, token.token_id)
            said["token_logprobs"].append(max(token.logprob, FLOOR))
            top = {token_text(self._tokenizer, other)[0]: max(logprob, FLOOR) for other, logprob in token.top}
            said["top_logprobs"].append({**top, text: max(token.logprob, FLOOR)})
        return said

    def _add(self, said: dict[str, Any], token_id: int) -> str:
        text, _ = token_text(self._tokenizer, token_id)
        said["tokens"].append(text)
        said["text_offset"].append(self._offset)
        self._offset += len(text)
        return text
