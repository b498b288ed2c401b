"""What the server needs of an engine, a tokenizer and a chat template: nothing else of them is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from optimc_runtime.request import RequestId, RequestOutput, SamplingParams, Terms
from optimc_runtime.stats import EngineStats

if TYPE_CHECKING:
    from optimc_runtime.structured.grammar import Grammar
    from optimc_runtime.structured.grammar_spec import GrammarSpec


class TokenBytes(Protocol):
    """What single tokens stand for."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes the token adds to a text; empty for an id that is no token."""
        ...


class TextTokenizer(Protocol):
    """Text to token ids and back, and single ids to bytes. Whole answers come from the engine as text."""

    @property
    def pieces(self) -> TokenBytes:
        """The vocabulary, token by token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids that name no token contribute nothing."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the control tokens."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token given by its exact spelling, None if there is no such token."""
        ...


class PromptTemplate(Protocol):
    """Renders a conversation to the token ids that ask for the assistant's next turn."""

    @property
    def source(self) -> str:
        """The template as it is written."""
        ...

    @property
    def supports_tools(self) -> bool:
        """Whether the template shows the model the tools it is given."""
        ...

    def encode(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        """Return the prompt's token ids; `extra` are more variables of the template.

        Raises RequestError if the template refuses the conversation.
        """
        ...


class EngineClient(Protocol):
    """The engine as the server sees it. Every method may be called from any thread and, `compile_grammar` aside,
    returns at once."""

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output."""
        ...

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request, prompt plus output: `max_seq_len`, or less where the KV pool is small."""
        ...

    @property
    def max_seqs(self) -> int:
        """Most requests that take part in one step."""
        ...

    def max_unfinished(self, tenant: str) -> int:
        """Return how many requests of the API key `tenant` ("": nobody's) are taken in while there are no others."""
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
        terms: Terms = ...,
        grammar: Grammar | None = None,
    ) -> RequestId:
        """Queue a request; `on_output` is called from the engine's thread. Raises RequestError or OverloadedError."""
        ...

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Return what keeps answers to `spec`. Takes up to seconds. Raises RequestError if there is no such grammar."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state. Aborting twice, or an id that is gone, does nothing."""
        ...

    def stats(self) -> EngineStats:
        """Return the current figures."""
        ...

    def stalled_s(self) -> float:
        """Return the seconds since the last finished step; 0 while the engine is idle, starting or moving."""
        ...

    def is_healthy(self, threshold_s: float) -> bool:
        """Return whether the engine made progress in the last `threshold_s` seconds, or has nothing to do."""
        ...
