"""What measurement needs of an engine. `optimc_runtime.engine.Engine` has it; so has a scripted one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from optimc.plan import Manifest
from optimc_runtime.request import RequestId, RequestOutput, SamplingParams


class ServedEngine(Protocol):
    """A started engine."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the plan it serves."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output."""
        ...

    @property
    def max_seqs(self) -> int:
        """Most requests that run at once."""
        ...

    @property
    def vocab_size(self) -> int:
        """V."""
        ...

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[RequestOutput], None],
    ) -> RequestId:
        """Queue a request; `on_output` is called from the engine's thread. Raises RequestError, OverloadedError."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """End a request early; unknown ids are ignored."""
        ...

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return teacher-forced logits [T, V]: row t is the prediction after tokens 0..t."""
        ...

    def reset_prefix_cache(self) -> object:
        """Forget cached prefixes."""
        ...

    def close(self) -> None:
        """Stop the engine and release the plan."""
        ...
