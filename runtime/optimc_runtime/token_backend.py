"""The `tokenizers` library behind two functions that speak our errors."""

from __future__ import annotations

from tokenizers import Tokenizer as Backend

from optimc.errors import PlanError, RequestError


def load_backend(tokenizer_json: bytes) -> Backend:
    """Return the tokenizer described by a `tokenizer.json`. Raises PlanError if the library cannot read it."""
    try:
        backend = Backend.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise PlanError(f"tokenizer.json is not one the tokenizers library reads: {error}") from error
    # Settings left over from training or batching would silently cut or lengthen prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def encode_text(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of `text`. Raises RequestError if it holds a lone surrogate, which no encoding can carry."""
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:
        position = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if position is None:
            raise
        raise RequestError(
            f"text is not valid Unicode: lone surrogate {text[position]!r} at character {position}"
        ) from None
    return ids
