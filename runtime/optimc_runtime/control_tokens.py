"""Chat text that users wrote must not form control tokens; the template's own scaffolding must.

After rendering, both look alike. So before rendering, in every user string, the first character of each special
token's spelling is replaced by a private-use stand-in (a trailing *beginning* of a spelling too, or two adjacent
strings could form one together). Whatever special spelling the rendered text then holds, the template put there. It
is renamed to a name no user can know, the stand-ins become the original characters again, and the whole text is
encoded in one piece by a second tokenizer whose special tokens bear those names. Encoding in one piece matters:
merges, prefix spaces and pre-tokenization stay what they are for any ordinary text.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

from optimc.errors import RequestError
from optimc_runtime.token_backend import encode_text, load_backend

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_NAME_END = "\U0010fffd"


class ControlTokens:
    """Special-token spellings of one tokenizer, and the encoder that tells scaffolding from user text."""

    def __init__(self, backend: Backend) -> None:
        spellings = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
        self._spellings = sorted(spellings, key=len, reverse=True)
        self._beginnings = {spelling[:end] for spelling in spellings for end in range(1, len(spelling))}
        self._longest = max(map(len, spellings), default=0)
        nonce = secrets.token_hex(8)
        self._names = {text: f"{_NAME_END}{nonce}{i}{_NAME_END}" for i, text in enumerate(self._spellings)}
        self._original = backend
        self._lock = threading.Lock()
        self._renamed_backend: Backend | None = None

    def guard(self, value: Any) -> tuple[Any, dict[str, str]]:
        """Return `value` (nested dicts, lists and strings) with stand-ins, and stand-in to original character.

        The mapping is empty, and the value returned as it is, if no string in it needs guarding.
        Raises RequestError if `value` is nested too deeply, or if a string needs guarding and the strings use up all
        private-use characters.
        """
        try:
            strings = list(_strings(value))
        except RecursionError:
            raise RequestError("messages are nested too deeply", param="messages") from None
        originals = sorted({text[at] for text in strings for at in self._starts(text)})
        if not originals:
            return value, {}
        used = set().union(*strings)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        stand_ins = dict(zip(originals, free, strict=False))
        if len(stand_ins) < len(originals):
            raise RequestError("messages use every private-use character of Unicode plane 15", param="messages")
        return self._replaced(value, stand_ins), {stand_in: char for char, stand_in in stand_ins.items()}

    def encode(self, rendered: str, originals: Mapping[str, str]) -> list[int]:
        """Return the ids of text rendered from guarded values: special tokens only where the template wrote them."""
        present = [spelling for spelling in self._spellings if spelling in rendered]
        if present:
            # Longest first, as the tokenizer itself matches.
            pattern = re.compile("|".join(map(re.escape, present)))
            rendered = pattern.sub(lambda match: self._names[match[0]], rendered)
        text = rendered.translate({ord(stand_in): char for stand_in, char in originals.items()})
        return encode_text(self._backend(), text, add_special_tokens=False)

    def _backend(self) -> Backend:
        """Return the tokenizer with renamed special tokens, built when first needed: most chats never need it."""
        with self._lock:
            if self._renamed_backend is None:
                # Written anew, not kept: the text is megabytes long.
                spec = _renamed(json.loads(self._original.to_str()), self._names)
                self._renamed_backend = load_backend(json.dumps(spec).encode())
            return self._renamed_backend

    def _starts(self, text: str) -> set[int]:
        """Return where in `text` a special spelling starts, or may start if other text follows."""
        starts: set[int] = set()
        for spelling in self._spellings:
            at = text.find(spelling)
            while at >= 0:
                starts.add(at)
                at = text.find(spelling, at + 1)
        end = len(text.rstrip())  # templates often trim
        starts.update(at for at in range(max(0, end - self._longest), end) if text[at:end] in self._beginnings)
        return starts

    def _replaced(self, value: Any, stand_ins: Mapping[str, str]) -> Any:
        if isinstance(value, str):
            chars = list(value)
            for at in self._starts(value):
                chars[at] = stand_ins[chars[at]]
            return "".join(chars)
        if isinstance(value, Mapping):
            return {self._replaced(key, stand_ins): self._replaced(item, stand_ins) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._replaced(item, stand_ins) for item in value]
        return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _renamed(spec: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the tokenizer description with special tokens spelled by `names`, in the model's vocabulary as well.

    Order and number of tokens stay, so every id stays. The vocabulary is renamed too because some models (Unigram,
    word level, BPE that takes whole words first) would form the original spelling from ordinary text otherwise.
    """
    model = dict(spec["model"])
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        pairs = (tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
        model["merges"] = [list(pair) for pair in pairs if not ({*pair, "".join(pair)} & names.keys())]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**token, "content": names[token["content"]]} if token["special"] else token for token in spec["added_tokens"]
    ]
    return {**spec, "model": model, "added_tokens": added, "post_processor": None}
