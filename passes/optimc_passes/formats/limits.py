"""What each checkpoint format can hold, told from shapes alone: asked before any pass runs, and again at the end.

The limits are those of the tools that read the folder, not of the numbers: a file nobody loads is no export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from optimc.wording import listed
from optimc_passes.formats import awq, compressed_tensors, gptq

FormatName = Literal["gptq", "awq", "compressed-tensors"]
FORMATS: tuple[FormatName, ...] = ("gptq", "awq", "compressed-tensors")

GPTQ_MULTIPLE = 32
"""Inputs and outputs of a layer: codes and zero points of every width fill whole words."""


@dataclass(frozen=True)
class LayerFacts:
    """What matters of one quantized linear layer."""

    layer: str
    shape: tuple[int, int]
    """(N, C)."""
    bits: int | None
    """None: not known yet."""
    group: int | None
    """Columns that share a scale, C for a whole row; None: not known yet."""
    symmetric: bool = False
    is_head: bool = False
    is_embedding: bool = False
    permuted: bool = False


def format_problems(format_name: FormatName, layers: Sequence[LayerFacts]) -> list[str]:
    """Return a sentence for each thing the format cannot hold, naming the layers (up to five) and the remedy."""
    tables = [layer for layer in layers if layer.is_embedding]
    linears = [layer for layer in layers if not layer.is_embedding]
    problems = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[format_name](linears)
    return problems + _sentence(tables, f"{format_name} holds linear layers only; leave the embedding as it is")


def ragged_layers(layers: Iterable[LayerFacts]) -> list[str]:
    """Return the layers whose last group is smaller than the others."""
    return [layer.layer for layer in layers if layer.group and layer.shape[1] % layer.group]


def nominal_group(layers: Sequence[LayerFacts]) -> int:
    """Return the group size that stands for most layers: -1 where their groups are whole rows.

    A row that is shorter than the others' groups is one group of theirs.
    """
    parts = Counter(layer.group for layer in layers if layer.group is not None and layer.group < layer.shape[1])
    return max(parts, key=lambda group: (parts[group], group)) if parts else -1


def group_of(layer: LayerFacts, nominal: int) -> int:
    """Return how a layer's group size is written beside a nominal one; -1 means the whole row."""
    assert layer.group is not None
    if layer.group == layer.shape[1]:
        return nominal if layer.group <= nominal else -1
    return layer.group


def _gptq(layers: Sequence[LayerFacts]) -> list[str]:
    wrong_bits = [layer for layer in layers if layer.bits is not None and layer.bits not in gptq.BITS]
    uneven = [layer for layer in layers if any(size % GPTQ_MULTIPLE for size in layer.shape)]
    problems = _sentence(wrong_bits, "gptq holds 2, 3, 4 and 8 bits")
    problems += _sentence(
        uneven, f"gptq needs outputs and inputs that are multiples of {GPTQ_MULTIPLE}; add the layers to ignore"
    )
    return problems


def _awq(layers: Sequence[LayerFacts]) -> list[str]:
    problems = _sentence([layer for layer in layers if layer.bits not in (awq.BITS, None)], "awq holds 4 bits only")
    unknown = [layer for layer in layers if layer.bits is None]
    problems += _sentence(unknown, "awq holds one width for all layers, so bits: auto cannot be written")
    heads = [layer for layer in layers if layer.is_head]
    problems += _sentence(heads, "awq has no quantized output head; leave lm_head on ignore")
    permuted = [layer for layer in layers if layer.permuted]
    problems += _sentence(permuted, "awq has no order of columns; export as gptq")
    narrow = [layer for layer in layers if layer.shape[0] % awq.CODES_PER_WORD]
    problems += _sentence(narrow, f"awq needs outputs that are multiples of {awq.CODES_PER_WORD}; add them to ignore")
    problems += _sentence(_ragged(layers), "awq needs groups that divide the inputs; choose another group_size")
    known = [layer for layer in layers if layer.group is not None]
    nominal = nominal_group(known)
    others = [layer for layer in known if group_of(layer, nominal) != nominal]
    return problems + _sentence(others, f"awq holds one group size for all layers, and most have {nominal}")


def _compressed(layers: Sequence[LayerFacts]) -> list[str]:
    wrong_bits = [layer for layer in layers if layer.bits is not None and layer.bits not in compressed_tensors.BITS]
    problems = _sentence(wrong_bits, "compressed-tensors holds 2, 3, 4 and 8 bits")
    permuted = [layer for layer in layers if layer.permuted]
    problems += _sentence(permuted, "compressed-tensors no longer has an order of columns; export as gptq")
    return problems + _sentence(
        _ragged(layers), "compressed-tensors needs groups that divide the inputs; choose another group_size"
    )


def _ragged(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    ragged = set(ragged_layers(layers))
    return [layer for layer in layers if layer.layer in ragged]


def _sentence(layers: Sequence[LayerFacts], problem: str) -> list[str]:
    if not layers:
        return []
    named = [
        f"{layer.layer} ({layer.shape[0]} × {layer.shape[1]}"
        + (f", group {layer.group}" if layer.group is not None else "")
        + (f", {layer.bits} bits)" if layer.bits is not None else ")")
        for layer in layers
    ]
    return [f"{listed(named)}: {problem}"]
