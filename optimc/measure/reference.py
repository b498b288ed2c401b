"""The original model as the yardstick: transformers, float32, eager attention, weights as the build read them."""

from __future__ import annotations

import copy
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from optimc.errors import MeasureError, MissingExtraError
from optimc.progress import Progress, no_progress

if TYPE_CHECKING:
    from optimc_passes.checkpoint import Checkpoint

FREE_BYTES_KEPT = 2 << 30
"""Disk space that recording leaves alone."""


class Reference(Protocol):
    """Something that predicts: logits [T, V] float32 after each of the tokens [T]."""

    def logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the logits [T, V]; row t predicts token t + 1."""
        ...


class TransformersReference:
    """A checkpoint's model in transformers. Holds all weights in float32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.initialization import no_init_weights
        except ImportError as error:
            raise MissingExtraError("torch and transformers", "build", "the original model as reference") from error
        config = copy.deepcopy(checkpoint.config)
        # The checkpoint's own dtype must not decide the yardstick's arithmetic.
        config.dtype = torch.float32
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        model.tie_weights()
        _copy_weights(model, checkpoint)
        self._torch = torch
        self._model = model.eval()

    def logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the logits [T, V] of the window on its own, without any earlier context."""
        torch = self._torch
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            output: NDArray[np.float32] = self._model(input_ids=ids, use_cache=False).logits[0].float().numpy()
        return output


def _copy_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Fill the model in place, one tensor at a time. Tied tensors share storage, so one of them is enough."""
    import torch

    from optimc_passes.weights import Quantized

    filled: set[int] = set()
    state = model.state_dict()
    for name, tensor in state.items():
        if name in checkpoint.weights:
            weight = checkpoint.weights[name]
            # A dense weight's own dtype may be one torch cannot take from NumPy (bf16 of ml_dtypes).
            array = weight.dequantize() if isinstance(weight, Quantized) else weight.read()
            if array.dtype.kind not in "iub":
                array = array.astype(np.float32)
            tensor.copy_(torch.from_numpy(np.array(array)))
            filled.add(tensor.data_ptr())
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in filled]
    if missing:
        raise MeasureError(
            f"{checkpoint.source}: no weights for {', '.join(missing[:5])}; it cannot serve as reference"
        )


class RecordedReference:
    """The logits of known windows, computed once and read back from disk: for comparing many engines with one model
    without holding the model beside them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def record(
        cls,
        reference: Reference,
        windows: NDArray[np.int32],
        folder: Path,
        progress: Progress = no_progress,
        *,
        free_bytes: int | None = None,
    ) -> Reference:
        """Compute and store the logits of all windows [W, T] under `folder`.

        Returns `reference` itself if they would not fit on the disk (`free_bytes` None asks the disk): then they are
        computed again for each engine.
        """
        folder.mkdir(parents=True, exist_ok=True)
        recorded = cls(folder)
        available = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
        for number, window in enumerate(windows):
            logits = reference.logits(window)
            if number == 0 and logits.nbytes * len(windows) + FREE_BYTES_KEPT > available:
                return reference
            np.save(recorded._path(window), logits)
            progress(number + 1, len(windows), "original model")
        return recorded

    def logits(self, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the recorded logits [T, V] of these tokens, mapped from the file."""
        logits: NDArray[np.float32] = np.load(self._path(tokens), mmap_mode="r")
        return logits

    def _path(self, tokens: NDArray[np.int32]) -> Path:
        return self._folder / f"{hashlib.sha256(tokens.astype('<i4').tobytes()).hexdigest()}.npy"
