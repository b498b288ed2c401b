"""compressed-tensors checkpoints: packed integers, plain int8, and fp8, each layer by its `config_groups`.

A layer of N outputs and C inputs with g groups (one for `channel` and `tensor`):

    pack-quantized    weight_packed int32 [N, C*b/32], weight_shape int64 [2]; code 0 .. 2**b - 1, the signed value plus
                      2**(b-1); weight_zero_point int32, packed along the outputs [N*b/32, g], or int8 [N, g]
    int-quantized     weight int8 [N, C]; weight_zero_point int8 [N, g]
    float-quantized   weight float8_e4m3 [N, C]
    all of them       weight_scale [N, g], [1] for `tensor`, or a grid of blocks; w = (value - zero point) * scale
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import UnsupportedModelError
from optimc_passes.formats.config_groups import BITS, INTEGER, PACKED, ConfigGroup, group_of, is_named, read_groups
from optimc_passes.formats.packing import pack_bits, packed_words, unpack_bits
from optimc_passes.formats.scheme import (
    PackedLayer,
    QuantScheme,
    count_groups,
    finite_scales,
    names,
    narrow_scales,
    scales_entry,
)
from optimc_passes.weights import Dense, Quantized, Weight

if TYPE_CHECKING:
    from optimc_passes.load.safetensors_file import TensorEntry

__all__ = ["BITS", "INTEGER", "PACKED", "CompressedTensorsScheme", "int8_layer", "pack_layer"]

_ZERO_DTYPES = ("I8", "I32")


class CompressedTensorsScheme(QuantScheme):
    """The `quantization_config` of a compressed-tensors checkpoint."""

    method = "compressed-tensors"
    parts = frozenset(
        {
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "input_scale",
            "input_zero_point",
            "output_scale",
            "output_zero_point",
        }
    )

    def __init__(self, facts: Mapping[str, Any], where: str) -> None:
        _refuse_transforms(facts, where)
        self._groups = read_groups(facts, where)
        self._ignore = names(facts, "ignore", where)

    def expects(self, layer: str, *, is_head: bool) -> bool | None:  # noqa: ARG002
        """Whether a group targets the layer and `ignore` does not name it."""
        return not is_named(self._ignore, layer) and group_of(self._groups, layer) is not None

    def is_packed(self, parts: Mapping[str, TensorEntry]) -> bool:
        """Whether there are packed codes, or a scale beside the weight."""
        return "weight_packed" in parts or "weight_scale" in parts

    def read(self, packed: PackedLayer, notes: list[str]) -> Weight:
        """Return the layer's weight: integers as they are, fp8 as the product with its scales in float32."""
        group = group_of(self._groups, packed.layer)
        assert group is not None, "layers that nothing targets are refused before"
        if group.is_float:
            return _read_float(packed, group, notes)
        return _read_integers(packed, group, notes)


def pack_layer(weight: Quantized) -> dict[str, Dense]:
    """Return the tensors of a quantized layer [N, C] in the packed form, by the last part of their names.

    They are packed when they are read.
    """
    assert weight.permutation is None
    outputs, columns = weight.shape
    bits, i32 = weight.bits, np.dtype(np.int32)
    zeros = weight.zeros
    tensors = {
        "weight_packed": Dense(
            (outputs, packed_words(columns, bits)), i32, lambda: pack_bits(weight.codes.read(), bits)
        ),
        "weight_scale": Dense.of(narrow_scales(weight.scales.read())),
        "weight_shape": Dense.of(np.array(weight.shape, np.int64)),
    }
    if zeros is not None:

        def read_zeros() -> NDArray[np.int32]:
            return np.ascontiguousarray(pack_bits(np.ascontiguousarray(zeros.read().T), bits).T)

        tensors["weight_zero_point"] = Dense((packed_words(outputs, bits), zeros.shape[1]), i32, read_zeros)
    return tensors


def int8_layer(weight: Quantized) -> dict[str, Dense]:
    """Return the tensors of a symmetric 8-bit layer [N, C] as plain int8, with its static input scale if it has one."""
    assert weight.bits == 8, weight.bits
    assert weight.symmetric
    assert weight.permutation is None

    def read_codes() -> NDArray[np.int8]:
        return (weight.codes.read().astype(np.int16) - 128).astype(np.int8)

    tensors = {
        "weight": Dense(weight.shape, np.dtype(np.int8), read_codes),
        "weight_scale": Dense.of(narrow_scales(weight.scales.read())),
    }
    if weight.activation_scale is not None:
        tensors["input_scale"] = Dense.of(np.array([weight.activation_scale], np.float32))
    return tensors


def _read_integers(packed: PackedLayer, group: ConfigGroup, notes: list[str]) -> Quantized:
    outputs, columns = packed.shape
    bits, columns_per_group = group.bits, columns if group.group == -1 else min(group.group, columns)
    groups = count_groups(columns, columns_per_group)
    half = 2 ** (bits - 1)
    if group.format == PACKED:
        words = packed_words(columns, bits)
        source = packed.entry("weight_packed", ("I32",), (outputs, words), f"num_bits {bits} in {group.name}")
        _check_stated_shape(packed)
    else:
        source = packed.entry("weight", ("I8",), (outputs, columns), f"format {group.format}")
        if bits != 8:
            raise packed.fault(f"{group.name} says num_bits {bits}, but {group.format} holds 8 bits")

    def read_codes() -> NDArray[np.uint8]:
        if group.format == PACKED:
            codes = unpack_bits(source.read(), bits, columns)
        else:
            codes = (source.read().astype(np.int16) + half).astype(np.uint8)
        return codes if permutation is None else codes[:, permutation]

    read_scales = _scale_reader(packed, group, groups)
    permutation = _permutation(packed, columns_per_group)
    if group.token_activations:
        notes.append("made for 8-bit activations with a scale per token: target.activation_scales: row serves it so")
    u8, f32 = np.dtype(np.uint8), np.dtype(np.float32)
    return Quantized(
        codes=Dense((outputs, columns), u8, read_codes),
        scales=Dense((outputs, groups), f32, read_scales),
        zeros=_zeros(packed, group, groups),
        bits=bits,
        group=columns_per_group,
        permutation=None if permutation is None else Dense.of(permutation),
        method=CompressedTensorsScheme.method,
        activation_scale=_activation_scale(packed, group, notes),
    )


def _read_float(packed: PackedLayer, group: ConfigGroup, notes: list[str]) -> Dense:
    outputs, columns = packed.shape
    source = packed.entry("weight", ("F8_E4M3",), (outputs, columns), f"format {group.format}")
    block = group.block
    if block is None:
        columns_per_group = columns if group.group == -1 else min(group.group, columns)
        read_scales = _scale_reader(packed, group, count_groups(columns, columns_per_group))
    else:
        grid = (count_groups(outputs, block[0]), count_groups(columns, block[1]))
        scales = scales_entry(packed, "weight_scale", grid, f"block_structure {list(block)}")

    def read() -> NDArray[np.float32]:
        values: NDArray[np.float32] = source.read().astype(np.float32)
        if block is None:
            spread: NDArray[np.float32] = read_scales()[:, np.arange(columns) // columns_per_group]
            return values * spread
        rows, groups = np.arange(outputs) // block[0], np.arange(columns) // block[1]
        return values * scales.read().astype(np.float32)[rows][:, groups]

    notes.append("fp8 weights were read as the numbers they stand for, in float32: quantize them again in the recipe")
    return Dense((outputs, columns), np.dtype(np.float32), read)


def _scale_reader(packed: PackedLayer, group: ConfigGroup, groups: int) -> Callable[[], NDArray[np.float32]]:
    """Return a function that reads the scales as float32 [N, g]."""
    outputs = packed.shape[0]
    found = packed.parts.get("weight_scale")
    shape: tuple[int, ...] = (outputs, groups)
    if group.strategy == "tensor":
        shape = found.shape if found is not None and math.prod(found.shape) == 1 else (1,)
    elif found is not None and groups == 1 and found.shape == (outputs,):
        shape = (outputs,)  # older files leave the axis of groups out
    claim = f"strategy {group.strategy}" + (f", group_size {group.group}" if group.group != -1 else "")
    entry = scales_entry(packed, "weight_scale", shape, claim)

    def read() -> NDArray[np.float32]:
        scales = entry.read().astype(np.float32)
        if math.prod(entry.shape) == 1:
            return np.full((outputs, groups), scales.reshape(()))
        return scales.reshape(outputs, groups)

    return read


def _zeros(packed: PackedLayer, group: ConfigGroup, groups: int) -> Dense | None:
    """Return the zero points, uint8 [N, g], moved up by half the range as the codes are; None for symmetric layers."""
    outputs = packed.shape[0]
    found = packed.parts.get("weight_zero_point")
    if group.symmetric:
        if found is not None and found.read().any():
            raise packed.fault(f"{group.name} says symmetric: true, but weight_zero_point is not all 0")
        return None
    half = 2 ** (group.bits - 1)
    is_packed = found is not None and found.dtype == "I32"
    shape = (packed_words(outputs, group.bits), groups) if is_packed else (outputs, groups)
    entry = packed.entry("weight_zero_point", _ZERO_DTYPES, shape, f"{group.name} says symmetric: false")

    def read() -> NDArray[np.uint8]:
        if is_packed:
            return np.ascontiguousarray(unpack_bits(entry.read().T, group.bits, outputs).T)
        moved: NDArray[np.uint8] = (entry.read().astype(np.int16) + half).astype(np.uint8)
        return moved

    if not is_packed and (np.abs(entry.read().astype(np.int16) + 0.5) > half).any():
        raise packed.fault(f"weight_zero_point has values that {group.bits} bits do not hold")
    return Dense((outputs, groups), np.dtype(np.uint8), read)


def _permutation(packed: PackedLayer, group: int) -> NDArray[np.int32] | None:
    if "weight_g_idx" not in packed.parts:
        return None
    columns = packed.shape[1]
    index = packed.entry("weight_g_idx", ("I32", "I64"), (columns,)).read()
    plain = np.arange(columns) // group
    if np.array_equal(index, plain) or (index == -1).all():
        return None
    order = np.argsort(index, kind="stable").astype(np.int32)
    if not np.array_equal(index[order], plain):
        raise packed.fault(f"weight_g_idx does not form groups of {group} columns each")
    return order


def _activation_scale(packed: PackedLayer, group: ConfigGroup, notes: list[str]) -> float | None:
    """Return the static scale of the layer's input, if it is one symmetric number; say so where it cannot be used."""
    if not group.static_activations:
        if "input_scale" in packed.parts:
            notes.append("scales of activations were not used: the description has no 8-bit integers they are for")
        return None
    entry = packed.parts.get("input_scale")
    if entry is None:
        raise packed.fault(f"{group.name} says that activations have a static scale, but there is no input_scale")
    zero = packed.parts.get("input_zero_point")
    if math.prod(entry.shape) != 1 or (zero is not None and zero.read().any()):
        notes.append("static scales of activations that are not one number around 0 were not used")
        return None
    scale = float(finite_scales(packed, entry).reshape(()))
    if scale <= 0:
        raise packed.fault(f"input_scale is {scale}, which is no scale")
    return scale


def _check_stated_shape(packed: PackedLayer) -> None:
    """Compare `weight_shape` with the model's, where the checkpoint has it."""
    if "weight_shape" not in packed.parts:
        return
    stated = packed.entry("weight_shape", ("I32", "I64"), (2,)).read().tolist()
    if stated != list(packed.shape):
        raise packed.fault(f"weight_shape is {stated}, the configuration makes it {list(packed.shape)}")


def _refuse_transforms(facts: Mapping[str, Any], where: str) -> None:
    """Refuse what would make the model compute something else than its weights say."""
    transforms = facts.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise UnsupportedModelError(f"{where}: transform_config asks for rotations of activations, which are not read")
    sparsity = facts.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(f"{where}: weights are stored sparse ({sparsity['format']}), which is not read")
