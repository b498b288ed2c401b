"""GPTQ checkpoints (the algorithm: arXiv 2210.17323; the layout is the one AutoGPTQ introduced).

A layer of N outputs and C inputs with b-bit codes and g groups:

    qweight  int32 [C*b/32, N]   codes, packed along the inputs
    qzeros   int32 [g, N*b/32]   zero points, packed along the outputs: as they are in `gptq_v2`, less one in `gptq`
    scales   float16 [g, N]
    g_idx    int32 [C]           the group of each input; absent where it is c // G
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.formats.packing import pack_bits, packed_words, unpack_bits
from optimc_passes.formats.scheme import (
    PackedLayer,
    QuantScheme,
    boolean,
    count_groups,
    expression,
    group_size,
    integer,
    narrow_scales,
    scales_entry,
    transposed_scales,
)
from optimc_passes.weights import Dense, Quantized

if TYPE_CHECKING:
    from optimc_passes.load.safetensors_file import TensorEntry

BITS = (2, 3, 4, 8)
"""Widths that are read and written."""

V1, V2 = "gptq", "gptq_v2"
"""Values of `checkpoint_format`: zero points stored less one, and as they are."""


@dataclass(frozen=True)
class GptqLayer:
    """What the description says about one layer."""

    bits: int
    group: int
    """-1 means the whole row."""
    symmetric: bool
    act_order: bool


class GptqScheme(QuantScheme):
    """The `quantization_config` of a GPTQ checkpoint."""

    method = "gptq"
    parts = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, facts: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._default = facts
        self._layer = self._layer_of(facts)
        self._head = None if facts.get("lm_head") is None else boolean(facts, "lm_head", where)
        self._zero_offset, self._borrows = _zero_convention(facts, where)
        self._dynamic = _dynamic_rules(facts, where)

    def expects(self, layer: str, *, is_head: bool) -> bool | None:
        """The head counts as quantized only if `lm_head` says so, any other layer unless `dynamic` excludes it."""
        for pattern, overrides in self._dynamic:
            if pattern.match(layer):
                return overrides is not None
        if is_head:
            return self._head
        return True

    def is_packed(self, parts: Mapping[str, TensorEntry]) -> bool:
        """Whether there is a qweight."""
        return "qweight" in parts

    def read(self, packed: PackedLayer, notes: list[str]) -> Quantized:
        """Return the layer's weight; columns in the order of their groups where `g_idx` is not the plain one."""
        facts = self._describe(packed.layer)
        outputs, columns = packed.shape
        bits, group = facts.bits, columns if facts.group == -1 else min(facts.group, columns)
        groups = count_groups(columns, group)
        claim = f"bits {bits} in the configuration"
        qweight = packed.entry("qweight", ("I32",), (packed_words(columns, bits), outputs), claim)
        qzeros = packed.entry("qzeros", ("I32",), (groups, packed_words(outputs, bits)), f"{claim}, {groups} groups")
        scales = scales_entry(packed, "scales", (groups, outputs), f"group_size {facts.group}")
        permutation = self._permutation(packed, facts, group)
        self._check_zeros(packed, facts, qzeros, notes)

        def read_codes() -> NDArray[np.uint8]:
            codes = unpack_bits(qweight.read().T, bits, columns)
            return codes if permutation is None else codes[:, permutation]

        def read_zeros() -> NDArray[np.uint8]:
            return np.ascontiguousarray(self._zeros(qzeros, bits, outputs).T)

        u8 = np.dtype(np.uint8)
        return Quantized(
            codes=Dense((outputs, columns), u8, read_codes),
            scales=transposed_scales(scales),
            zeros=None if facts.symmetric else Dense((outputs, groups), u8, read_zeros),
            bits=bits,
            group=group,
            permutation=None if permutation is None else Dense.of(permutation),
            method=self.method,
        )

    def _describe(self, layer: str) -> GptqLayer:
        for pattern, overrides in self._dynamic:
            if pattern.match(layer):
                return self._layer_of({**self._default, **(overrides or {})})
        return self._layer

    def _layer_of(self, facts: Mapping[str, Any]) -> GptqLayer:
        bits = integer(facts, "bits", self._where)
        if bits not in BITS:
            raise UnsupportedModelError(f"{self._where}: GPTQ with {bits} bits; readable are 2, 3, 4 and 8")
        return GptqLayer(
            bits=bits,
            group=group_size(facts, "group_size", self._where),
            symmetric=boolean(facts, "sym", self._where, default=True),
            act_order=boolean(facts, "desc_act", self._where, default=False),
        )

    def _zeros(self, qzeros: TensorEntry, bits: int, outputs: int) -> NDArray[np.uint8]:
        """Return the zero points [g, N]."""
        words = qzeros.read()
        if self._borrows and bits != 3:
            one_each = sum(1 << shift for shift in range(0, 32, bits))
            return unpack_bits((words.view(np.uint32) + np.uint32(one_each)).view(np.int32), bits, outputs)
        stored = unpack_bits(words, bits, outputs)
        mask = np.uint8(2**bits - 1)
        zeros: NDArray[np.uint8] = (stored + np.uint8(self._zero_offset)) & mask
        return zeros

    def _check_zeros(self, packed: PackedLayer, facts: GptqLayer, qzeros: TensorEntry, notes: list[str]) -> None:
        zeros = self._zeros(qzeros, facts.bits, packed.shape[0])
        middle = 2 ** (facts.bits - 1)
        if facts.symmetric and not (zeros == middle).all():
            others = zeros[zeros != middle]
            other_version = V2 if self._zero_offset else V1
            raise packed.fault(
                f"the configuration says sym: true, but {others.size} zero points are not {middle}, one {others[0]}; "
                f"set sym to false, or checkpoint_format to {other_version} if they are one off"
            )
        if self._zero_offset and not self._borrows and not zeros.all():
            notes.append(
                "zero points of 0, which the gptq format stores as all ones, were read as 0; writers differ there, "
                "gptq_v2 has no such doubt"
            )

    def _permutation(self, packed: PackedLayer, facts: GptqLayer, group: int) -> NDArray[np.int32] | None:
        """Return the columns in the order of their groups; None where that is the order they have."""
        columns = packed.shape[1]
        if "g_idx" not in packed.parts:
            return None
        index = packed.entry("g_idx", ("I32", "I64"), (columns,)).read()
        plain = np.arange(columns) // group
        if np.array_equal(index, plain):
            return None
        if not facts.act_order:
            place = int(np.flatnonzero(index != plain)[0])
            raise packed.fault(
                f"the configuration says desc_act: false, but g_idx puts column {place} into group "
                f"{int(index[place])} instead of {int(plain[place])}"
            )
        order = np.argsort(index, kind="stable").astype(np.int32)
        if not np.array_equal(index[order], plain):
            raise packed.fault(f"g_idx does not form groups of {group} columns each")
        return order


def choose_version(symmetric: bool) -> str:
    """Return the `checkpoint_format` to write: the older, which all tools read, if every layer is symmetric.

    With zero points of their own the older one would have to store -1 for 0, and its readers disagree on what that
    does to neighbouring bits: GPTQModel, and transformers through it, take such folders from GPTQModel alone.
    """
    return V1 if symmetric else V2


def pack_layer(weight: Quantized, version: str) -> dict[str, Dense]:
    """Return the tensors of a quantized layer [N, C], by the last part of their names; packed when they are read.

    N and C must fill whole words. Scales are float16 where that holds them exactly, float32 else.
    """
    outputs, columns = weight.shape
    bits, group = weight.bits, weight.group
    groups = count_groups(columns, group)
    order = None if weight.permutation is None else weight.permutation.read()
    index = (np.arange(columns) // group).astype(np.int32)
    if order is not None:
        index = _unsorted(index, order)

    def read_codes() -> NDArray[np.int32]:
        codes = weight.codes.read()
        return np.ascontiguousarray(pack_bits(codes if order is None else _unsorted(codes, order), bits).T)

    def read_zeros() -> NDArray[np.int32]:
        if weight.zeros is None:
            zeros = np.full((groups, outputs), 2 ** (bits - 1), np.uint8)
        else:
            zeros = np.ascontiguousarray(weight.zeros.read().T)
        if version == V1:
            assert zeros.all(), "a zero point of 0 has no agreed form in this version"
            zeros = zeros - np.uint8(1)
        return pack_bits(zeros, bits)

    i32 = np.dtype(np.int32)
    return {
        "qweight": Dense((packed_words(columns, bits), outputs), i32, read_codes),
        "qzeros": Dense((groups, packed_words(outputs, bits)), i32, read_zeros),
        "scales": Dense.of(np.ascontiguousarray(narrow_scales(weight.scales.read()).T)),
        "g_idx": Dense.of(index),
    }


def _unsorted(values: NDArray[Any], order: NDArray[np.int32]) -> NDArray[Any]:
    """Undo a permutation of the last axis."""
    source = np.empty_like(values)
    source[..., order] = values
    return source


def _zero_convention(facts: Mapping[str, Any], where: str) -> tuple[int, bool]:
    """Return what to add to stored zero points, and whether one was taken from whole words, so that bits were borrowed.

    GPTQModel subtracts from whole words; others from each zero point. Only zero points of 0 tell them apart.
    """
    version = facts.get("checkpoint_format", V1)
    if version == V2:
        return 0, False
    if version != V1:
        raise UnsupportedModelError(f"{where}: checkpoint_format '{version}' is not read; readable are {V1} and {V2}")
    meta = facts.get("meta")
    quantizers = meta.get("quantizer", "") if isinstance(meta, dict) else ""
    return 1, any(str(name).startswith("gptqmodel") for name in np.atleast_1d(quantizers))


def _dynamic_rules(facts: Mapping[str, Any], where: str) -> list[tuple[re.Pattern[str], Mapping[str, Any] | None]]:
    """Return patterns over module names with what they change; None leaves the layer dense. The first match counts."""
    dynamic = facts.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"{where}: dynamic must map patterns to settings, got {dynamic!r}")
    rules: list[tuple[re.Pattern[str], Mapping[str, Any] | None]] = []
    for pattern, overrides in dynamic.items():
        excludes = pattern.startswith("-:")
        matching = expression(pattern.removeprefix("-:").removeprefix("+:"), f"{where}: dynamic")
        if not excludes and not isinstance(overrides, dict):
            raise CheckpointError(f"{where}: dynamic: '{pattern}' must have settings, got {overrides!r}")
        rules.append((matching, None if excludes else overrides))
    return rules
