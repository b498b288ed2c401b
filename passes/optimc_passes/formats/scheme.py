"""What a checkpoint's configuration says about its quantized layers, whatever the format."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError
from optimc_passes.weights import Dense, Weight

if TYPE_CHECKING:
    from optimc_passes.load.safetensors_file import TensorEntry


PATTERN_PREFIX = "re:"
"""Of names that stand for all layers a regular expression matches from their beginning."""


@dataclass(frozen=True)
class PackedLayer:
    """The tensors of one quantized linear layer as they lie in the checkpoint."""

    layer: str
    """Module name in the model, "model.layers.0.mlp.up_proj"."""
    shape: tuple[int, int]
    """(N, C): output and input features, as the model's configuration has them."""
    parts: Mapping[str, TensorEntry]
    """By the last part of their names: "qweight", "weight_scale", ..."""
    where: str
    """The checkpoint, for messages."""

    def entry(self, part: str, dtypes: tuple[str, ...], shape: tuple[int, ...], because: str = "") -> TensorEntry:
        """Return a part after checking it. `because` says what makes the shape the right one.

        Raises CheckpointError if it is absent, or of another dtype or shape.
        """
        found = self.parts.get(part)
        if found is None:
            raise self.fault(f"there is no {part}")
        if found.dtype not in dtypes:
            raise self.fault(f"{part} is {found.dtype}, expected {' or '.join(dtypes)}")
        if found.shape != shape:
            reason = f" ({because})" if because else ""
            raise self.fault(f"{part} is {list(found.shape)}, expected {list(shape)}{reason}")
        return found

    def fault(self, message: str) -> CheckpointError:
        """Return the error that names this layer."""
        return CheckpointError(f"{self.where}: {self.layer}: {message}")


class QuantScheme(ABC):
    """The description of one checkpoint; it knows how to read any of its layers."""

    method: ClassVar[str]
    """What `quant_method` calls the format."""
    parts: ClassVar[frozenset[str]]
    """Last parts of the names of tensors that only quantized layers have."""

    @abstractmethod
    def expects(self, layer: str, *, is_head: bool) -> bool | None:
        """Whether the description says that this layer is quantized; None if it says nothing about it."""

    @abstractmethod
    def is_packed(self, parts: Mapping[str, TensorEntry]) -> bool:
        """Whether a layer with these tensors is quantized in fact."""

    @abstractmethod
    def read(self, packed: PackedLayer, notes: list[str]) -> Weight:
        """Return the layer's weight, to be unpacked when somebody looks at it.

        Small parts are read and compared with the description now. Raises CheckpointError where they contradict it.
        """


def finite_scales(packed: PackedLayer, entry: TensorEntry) -> NDArray[np.float32]:
    """Return an entry's scales in float32. Raises CheckpointError if one is not finite."""
    scales = entry.read().astype(np.float32)
    bad = int(np.count_nonzero(~np.isfinite(scales)))
    if bad:
        raise packed.fault(f"{bad} of {scales.size} scales in {entry.name.rpartition('.')[2]} are not finite")
    return scales


def scales_entry(packed: PackedLayer, part: str, shape: tuple[int, ...], claim: str) -> TensorEntry:
    """Return a layer's floating-point scales. Raises CheckpointError if their shape or one of them cannot be."""
    entry = packed.entry(part, ("F16", "BF16", "F32"), shape, claim)
    finite_scales(packed, entry)
    return entry


def transposed_scales(entry: TensorEntry) -> Dense:
    """Return scales stored as [g, N] as float32 [N, g]."""
    groups, outputs = entry.shape

    def read() -> NDArray[np.float32]:
        return np.ascontiguousarray(entry.read().T.astype(np.float32))

    return Dense((outputs, groups), np.dtype(np.float32), read)


def narrow_scales(scales: NDArray[np.float32]) -> NDArray[Any]:
    """Return scales as float16 if it holds all of them exactly, else as they are."""
    with np.errstate(over="ignore"):
        narrow = scales.astype(np.float16)
    return narrow if np.array_equal(narrow.astype(np.float32), scales) else scales


def count_groups(columns: int, group: int) -> int:
    """Return how many groups of `group` columns there are; the last may be ragged."""
    return -(-columns // group)


def integer(facts: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    """Return an integer of a description. Raises CheckpointError if it is absent or something else."""
    value = facts.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{where}: {key} must be an integer, got {value!r}")
    return value


def boolean(facts: Mapping[str, Any], key: str, where: str, *, default: bool | None = None) -> bool:
    """Return a boolean of a description. Raises CheckpointError if it is absent or something else."""
    value = facts.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} must be true or false, got {value!r}")
    return value


def names(facts: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """Return a list of names of a description, () where there is none. Raises CheckpointError if it is something else.

    Those that begin with `re:` must be regular expressions.
    """
    value = facts.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(f"{where}: {key} must be a list of names, got {value!r}")
    for name in value:
        if is_pattern(name):
            expression(name.removeprefix(PATTERN_PREFIX), f"{where}: {key}")
    return tuple(value)


def is_pattern(name: str) -> bool:
    """Whether a name of a layer is written as a regular expression."""
    return name.startswith(PATTERN_PREFIX)


def expression(text: str, where: str) -> re.Pattern[str]:
    """Return a regular expression of a description. Raises CheckpointError if it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: '{text}' is not a regular expression ({error})") from error


def group_size(facts: Mapping[str, Any], key: str, where: str) -> int:
    """Return a group size: positive, or -1 for the whole row. Raises CheckpointError if it is none."""
    value = integer(facts, key, where)
    if value != -1 and value < 1:
        raise CheckpointError(f"{where}: {key} must be positive, or -1 for the whole row, got {value}")
    return value
