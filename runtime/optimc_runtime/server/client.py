"""What the server needs of an engine, a tokenizer and a chat template: nothing else of them is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from optimc_runtime.request import RequestId, RequestOutput, SamplingParams
from optimc_runtime.stats import EngineStats


class TokenBytes(Protocol):
    """What single tokens stand for."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes the token adds to a text; empty for an id that is no token."""
        ...


class TextTokenizer(Protocol):
    """Text to token ids, and single ids to bytes. Whole answers come from the engine as text."""

    @property
    def pieces(self) -> TokenBytes:
        """The vocabulary, token by token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...


class PromptTemplate(Protocol):
    """Renders a conversation to the token ids that ask for the assistant's next turn."""

    def encode(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        """Return the prompt's token ids; `extra` are more variables of the template.

        Raises RequestError if the template refuses the conversation.
        """
        ...


class EngineClient(Protocol):
    """The engine as the server sees it. Every method may be called from any thread and returns at once."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """None for a plan without one: prompts and answers are then token ids only."""
        ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[RequestOutput], None],
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> RequestId:
        """Queue a request; `on_output` is called from the engine's thread. Raises RequestError or OverloadedError."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state. Aborting twice, or an id that is gone, does nothing."""
        ...

    def stats(self) -> EngineStats:
        """Return the current figures."""
        ...

    def is_healthy(self, threshold_s: float) -> bool:
        """Return whether the engine made progress in the last `threshold_s` seconds, or has nothing to do."""
        ...
