"""The model that heads are trained for: the artifact of a build, run as it would be served.

Passes know it by this contract alone; `optimc.build.target_model` runs it on the runtime's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc_passes.artifact import Artifact


class ChatFrame(NamedTuple):
    """What the model's chat template puts around the first user turn of a conversation."""

    before_user: list[int]
    """Token ids up to where the user's text begins, BOS included."""
    after_user: list[int]
    """Token ids from the end of the user's text to where the answer begins."""
    user_stop_ids: frozenset[int]
    """Tokens that end a user's turn."""


OnTokens = Callable[[int, NDArray[np.int64], NDArray[np.float32]], None]
"""(index of the prompt, tokens [n], hidden state [n, d] each was sampled from); the arrays are the caller's to keep."""


class TargetModel(Protocol):
    """A running engine of an artifact, without speculation."""

    hidden_size: int
    """d."""
    vocab_size: int
    """V."""
    max_seq_len: int
    """Longest sequence in tokens, prompt plus output."""
    max_seqs: int
    """Sequences it runs at once."""
    chat: ChatFrame | None
    """None: the model has no chat template that conversations could be sampled with."""
    no_chat: str
    """Why there is no frame; empty if there is one."""
    eos: frozenset[int]
    """Tokens that end an answer."""
    machine: str
    """What it runs on, in a few words."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: frozenset[int],
        on_tokens: OnTokens,
    ) -> None:
        """Continue every prompt until a stop token or `max_tokens`; prompt i draws with the seed `seed + i`.

        `on_tokens` is called once per prompt, in any order, from one thread at a time. The tokens end with the stop
        token if one was drawn.
        """
        ...

    def step_costs(self, rows: Sequence[int], context: int = 256) -> dict[int, float]:
        """Return the seconds that a step of one sequence takes by its number of rows, each with logits: medians.

        Sizes that no step can have are left out.
        """
        ...


class ModelOpener(Protocol):
    """How a build runs the artifact it has come to."""

    key: str
    """Hash of whatever beside the artifact changes hidden states: the target, its version, its options."""

    def open(self, artifact: Artifact, scratch: Path) -> AbstractContextManager[TargetModel]:
        """Run the artifact, with files below `scratch` for the time being.

        Raises MissingExtraError or PlanTargetError where the target cannot run on this machine.
        """
        ...
