"""Telling ONNX Runtime where in the plan file each weight lies, so that it maps them instead of copying.

A plan's program is an ONNX model without its weights. Protocol Buffers define that messages concatenated on the wire
are merged, repeated fields appended (https://protobuf.dev/programming-guides/encoding/#last-one-wins); so the weights'
declarations, which need the file's offsets, are appended to the model's bytes without parsing them. Field numbers are
those of onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MODEL_GRAPH = 7
_GRAPH_INITIALIZER = 5
_TENSOR_DIMS = 1
_TENSOR_DATA_TYPE = 2
_TENSOR_NAME = 8
_TENSOR_EXTERNAL_DATA = 13
_TENSOR_DATA_LOCATION = 14
_ENTRY_KEY = 1
_ENTRY_VALUE = 2
_EXTERNAL = 1


@dataclass(frozen=True, slots=True)
class ExternalWeight:
    """One initializer whose bytes lie in a file."""

    name: str
    onnx_dtype: int
    """A TensorProto.DataType."""
    shape: tuple[int, ...]
    location: str
    """File name, relative to the folder the session is given."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def declare_weights(model: bytes, weights: Iterable[ExternalWeight]) -> bytes:
    """Return the serialized model with `weights` among its initializers."""
    initializers = b"".join(_field(_GRAPH_INITIALIZER, _tensor(weight)) for weight in weights)
    return model + _field(_MODEL_GRAPH, initializers)


def _tensor(weight: ExternalWeight) -> bytes:
    entries = {"location": weight.location, "offset": str(weight.offset), "length": str(weight.nbytes)}
    return b"".join(
        [
            *(_number(_TENSOR_DIMS, size) for size in weight.shape),
            _number(_TENSOR_DATA_TYPE, weight.onnx_dtype),
            _field(_TENSOR_NAME, weight.name.encode()),
            *(
                _field(_TENSOR_EXTERNAL_DATA, _field(_ENTRY_KEY, key.encode()) + _field(_ENTRY_VALUE, value.encode()))
                for key, value in entries.items()
            ),
            _number(_TENSOR_DATA_LOCATION, _EXTERNAL),
        ]
    )


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _field(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Base 128, least significant group first, high bit set on all but the last."""
    assert value >= 0
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
