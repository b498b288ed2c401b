"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from optimc.plan import Plan
from optimc.plan.tensor_names import SPECIAL_TOKENS, TOKENIZER
from optimc_runtime.control_tokens import ControlTokens
from optimc_runtime.token_backend import encode_text, load_backend
from optimc_runtime.token_pieces import TokenPieces


class Tokenizer:
    """A `tokenizer.json` with its named special tokens. Safe to use from several threads.

    `special_tokens` maps names such as "bos_token" to their text, as chat templates see them.
    Raises PlanError if the JSON is not a tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, special_tokens: Mapping[str, str] | None = None) -> None:
        self._backend = load_backend(tokenizer_json)
        self._lock = threading.Lock()
        self._control_tokens: ControlTokens | None = None
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        """Name to text: bos_token, eos_token, ..."""
        added = self._backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        """Ids of the control tokens, which ordinary text should not be able to form."""

    @classmethod
    def from_plan(cls, plan: Plan) -> Tokenizer | None:
        """Return the plan's tokenizer, None if it carries none. Raises PlanError if it cannot be read."""
        if TOKENIZER not in plan:
            return None
        special = json.loads(plan.blob(SPECIAL_TOKENS)) if SPECIAL_TOKENS in plan else {}
        return cls(plan.blob(TOKENIZER), special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written in it are recognised as such.

        With `add_special_tokens` the tokenizer adds what its own settings say (a BOS, usually, or nothing).
        Raises RequestError if the text is not valid Unicode.
        """
        return encode_text(self._backend, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids that name no token contribute nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given by its exact spelling, None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's logits may have more columns than this."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """Id of the token named bos_token, None if there is none."""
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self.token_id(bos)

    @cached_property
    def adds_bos(self) -> bool:
        """Whether `encode` puts a BOS in front by the tokenizer's own setting."""
        ids = self.encode("a")
        return (
            self.bos_id is not None and ids[:1] == [self.bos_id] and self.encode("a", add_special_tokens=False) != ids
        )

    @cached_property
    def pieces(self) -> TokenPieces:
        """What single tokens stand for in the text."""
        # A decoder's state is its part of tokenizer.json, which is megabytes long.
        decoder: Any = None if self._backend.decoder is None else json.loads(self._backend.decoder.__getstate__())
        return TokenPieces(self._backend, decoder)

    @property
    def control_tokens(self) -> ControlTokens:
        """Encoder for texts whose user-written parts must not form special tokens."""
        with self._lock:
            if self._control_tokens is None:
                self._control_tokens = ControlTokens(self._backend)
            return self._control_tokens
