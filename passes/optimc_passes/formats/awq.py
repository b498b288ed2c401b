"""AWQ checkpoints (arXiv 2306.00978), in the layout that AutoAWQ calls GEMM.

A layer of N outputs and C inputs with 4-bit codes and g groups:

    qweight  int32 [C, N/8]   codes, packed along the outputs, each eight of them shuffled
    qzeros   int32 [g, N/8]   zero points, packed the same way, as they are
    scales   float16 [g, N]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import UnsupportedModelError
from optimc_passes.formats.packing import pack_awq, unpack_awq
from optimc_passes.formats.scheme import (
    PackedLayer,
    QuantScheme,
    boolean,
    count_groups,
    group_size,
    integer,
    names,
    narrow_scales,
    scales_entry,
    transposed_scales,
)
from optimc_passes.weights import Dense, Quantized

if TYPE_CHECKING:
    from optimc_passes.load.safetensors_file import TensorEntry

BITS = 4
CODES_PER_WORD = 8
_MIDDLE = 8


class AwqScheme(QuantScheme):
    """The `quantization_config` of an AWQ checkpoint."""

    method = "awq"
    parts = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, facts: Mapping[str, Any], where: str) -> None:
        # Writers call the layout by one of three keys.
        layouts = [facts.get(key) for key in ("version", "format", "checkpoint_format") if facts.get(key)]
        layout = str(layouts[0]).lower() if layouts else "gemm"
        if layout != "gemm":
            raise UnsupportedModelError(f"{where}: AWQ in the layout '{layout}' is not read; readable is gemm")
        bits = integer(facts, "bits" if "bits" in facts else "w_bit", where)
        if bits != BITS:
            raise UnsupportedModelError(f"{where}: AWQ with {bits} bits; readable are {BITS}")
        self._group = group_size(facts, "group_size" if "group_size" in facts else "q_group_size", where)
        self._symmetric = not boolean(facts, "zero_point", where, default=True)
        self._dense = names(facts, "modules_to_not_convert", where)

    def expects(self, layer: str, *, is_head: bool) -> bool | None:
        """`modules_to_not_convert` lists what stays dense, by parts of names; nothing is said about the head."""
        if any(name in layer for name in self._dense):
            return False
        return None if is_head else True

    def is_packed(self, parts: Mapping[str, TensorEntry]) -> bool:
        """Whether there is a qweight."""
        return "qweight" in parts

    def read(self, packed: PackedLayer, notes: list[str]) -> Quantized:  # noqa: ARG002
        """Return the layer's weight."""
        outputs, columns = packed.shape
        group = columns if self._group == -1 else min(self._group, columns)
        groups = count_groups(columns, group)
        if outputs % CODES_PER_WORD:
            raise packed.fault(f"{outputs} outputs do not fill words of eight codes, so this cannot be AWQ")
        words = outputs // CODES_PER_WORD
        claim = f"group_size {self._group}"
        qweight = packed.entry("qweight", ("I32",), (columns, words), f"{BITS} bits, packed along the outputs")
        qzeros = packed.entry("qzeros", ("I32",), (groups, words), claim)
        scales = scales_entry(packed, "scales", (groups, outputs), claim)
        if self._symmetric:
            zeros = unpack_awq(qzeros.read())
            if not (zeros == _MIDDLE).all():
                raise packed.fault(
                    f"the configuration says zero_point: false, but {np.count_nonzero(zeros != _MIDDLE)} zero points "
                    f"are not {_MIDDLE}"
                )

        def read_codes() -> NDArray[np.uint8]:
            return np.ascontiguousarray(unpack_awq(qweight.read()).T)

        def read_zeros() -> NDArray[np.uint8]:
            return np.ascontiguousarray(unpack_awq(qzeros.read()).T)

        u8 = np.dtype(np.uint8)
        return Quantized(
            codes=Dense((outputs, columns), u8, read_codes),
            scales=transposed_scales(scales),
            zeros=None if self._symmetric else Dense((outputs, groups), u8, read_zeros),
            bits=BITS,
            group=group,
            method=self.method,
        )


def pack_layer(weight: Quantized) -> dict[str, Dense]:
    """Return the tensors of a quantized layer [N, C] of 4 bits without a permutation, N a multiple of 8.

    They are packed when they are read. Symmetric layers get their zero points written out.
    """
    assert weight.bits == BITS, weight.bits
    assert weight.permutation is None
    outputs, columns = weight.shape
    groups = count_groups(columns, weight.group)

    def read_codes() -> NDArray[np.int32]:
        return pack_awq(np.ascontiguousarray(weight.codes.read().T))

    def read_zeros() -> NDArray[np.int32]:
        zeros = np.full((outputs, groups), _MIDDLE, np.uint8) if weight.zeros is None else weight.zeros.read()
        return pack_awq(np.ascontiguousarray(zeros.T))

    i32 = np.dtype(np.int32)
    return {
        "qweight": Dense((columns, outputs // CODES_PER_WORD), i32, read_codes),
        "qzeros": Dense((groups, outputs // CODES_PER_WORD), i32, read_zeros),
        "scales": Dense.of(np.ascontiguousarray(narrow_scales(weight.scales.read()).T)),
    }
