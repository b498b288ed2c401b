"""The Medusa heads: an engine of their own, whose logits come to the host, where candidates are picked.

Letters: N rows, d hidden size, K heads, V' draft vocabulary, k candidates per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from optimc.errors import EngineError
from optimc.plan import HeadsInfo
from optimc.plan.tensorrt_program import TensorRtProfile
from optimc_runtime import _native
from optimc_runtime.executor.base import DraftCandidates
from optimc_runtime.executor.tensorrt.contexts import ContextMaker, RepeatedShapes
from optimc_runtime.executor.tensorrt.cuda import CudaDevice, Pointer
from optimc_runtime.executor.tensorrt.engine import TensorRtEngine
from optimc_runtime.executor.tensorrt.host_rows import HostRows
from optimc_runtime.executor.tensorrt.staging import Staging

_ALIGNMENT = 256
_FLOAT_BYTES, _TOKEN_BYTES = 4, 8


class DraftHeads:
    """Evaluates the heads for rows of hidden states."""

    def __init__(
        self,
        device: CudaDevice,
        engine: TensorRtEngine,
        profile: TensorRtProfile,
        scratch: Pointer,
        info: HeadsInfo,
        vocab: NDArray[np.int32] | None,
        *,
        graphs: bool,
    ) -> None:
        """Allocate what rows need on their way. `engine` stays the caller's; `vocab` int32 [V'], None for all."""
        self._device, self._info, self._vocab, self._most = device, info, vocab, profile.largest["N"]
        self._hidden_bytes = -(-self._most * info.hidden_size * _FLOAT_BYTES // _ALIGNMENT) * _ALIGNMENT
        with ExitStack() as resources:
            self._staging = Staging(device, self._hidden_bytes + self._most * _TOKEN_BYTES)
            resources.callback(self._staging.close)
            columns = info.num_heads * info.draft_vocab_size
            self._logits = device.allocate(self._most * columns * _FLOAT_BYTES)
            resources.callback(device.free, self._logits)
            self._rows = HostRows(device, columns, self._most)
            resources.callback(self._rows.close)
            maker = ContextMaker(engine, 0, scratch, {}, {"logits": self._logits})
            self._contexts = RepeatedShapes(device, maker, graphs=graphs)
            resources.callback(self._contexts.close)
            self._resources = resources.pop_all()

    def draft(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64], top: int) -> DraftCandidates:
        """Return the likeliest `top` candidates of each head for `hidden` [N, d] and `tokens` [N].

        Raises EngineError if they do not fit the heads, or the device fails.
        """
        info, count = self._info, len(tokens)
        logits = self._rows.take(count)
        for part in _parts(count, self._most):
            self._enqueue(hidden[part], tokens[part])
            self._rows.download(np.arange(part.start, part.stop), self._logits)
            self._contexts.capture_new()
        self._device.synchronize()
        try:
            places, logprobs = _native.top_rows(logits.reshape(-1, info.draft_vocab_size), top)
        except ValueError as error:
            raise EngineError(str(error)) from error
        shape = (count, info.num_heads, top)
        ids = places if self._vocab is None else self._vocab[places]
        return DraftCandidates(ids.reshape(shape), logprobs.reshape(shape))

    def close(self) -> None:
        """Free everything but the engine."""
        self._resources.close()

    def _enqueue(self, hidden: NDArray[np.float32], tokens: NDArray[np.int64]) -> None:
        """Run the heads on rows that fit the profile, padded with rows of zeros."""
        count, width = hidden.shape
        padded = min(1 << (count - 1).bit_length(), self._most)
        buffer = self._staging.take()
        rows = buffer[: padded * width * _FLOAT_BYTES].view(np.float32).reshape(padded, width)
        rows[:count], rows[count:] = hidden, 0
        address = self._staging.address
        inputs: dict[str, tuple[Pointer, tuple[int, ...]]] = {"hidden": (address, (padded, width))}
        if self._info.conditioned:
            ids = buffer[self._hidden_bytes :][: padded * _TOKEN_BYTES].view(np.int64)
            ids[:count], ids[count:] = tokens, 0
            inputs["tokens"] = (Pointer(address + self._hidden_bytes), (padded,))
        self._staging.send(self._hidden_bytes + padded * _TOKEN_BYTES)
        self._contexts.run(inputs)


def _parts(count: int, most: int) -> Iterator[slice]:
    for first in range(0, count, most):
        yield slice(first, min(first + most, count))
