"""Engines built by TensorRT-RTX for one architecture, which needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import pytest

LETTERS = {
    "decode": {"T": (1, 4, 64), "B": (1, 4, 8), "Q": (1, 1, 16), "C": (1, 64, 512), "R": (1, 4, 64)},
    "prefill": {"T": (1, 64, 64), "B": (1, 1, 1), "Q": (1, 64, 64), "C": (1, 64, 512), "R": (1, 1, 64)},
    "draft": {"N": (1, 4, 8)},
}
"""Smallest, likeliest and largest of each letter, as in the plan's profiles."""


def _bounds(dim: int | str, letters: dict[str, tuple[int, int, int]]) -> tuple[int, int, int]:
    if isinstance(dim, int):
        return dim, dim, dim
    letter = dim.partition("_")[0]
    if letter == "rows":
        return 1, 257, 4096
    if letter == "K":
        c, q = letters["C"], letters["Q"]
        return c[0] + q[0], c[1] + q[1], c[2] + q[2]
    return letters[letter]


def build(model: ir.Model, profiles: Sequence[str] = ("decode", "prefill")) -> bytes:
    """Build with TensorRT-RTX for one architecture; return the plan. Raises AssertionError with its words."""
    trt = pytest.importorskip("tensorrt_rtx")

    class Log(trt.ILogger):
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.WARNING:
                self.lines.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse(ir.to_proto(model).SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise AssertionError([(error.node_name(), error.desc()) for error in errors])
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    for name in profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            dims = [tensor.get_dimension_name(axis) or size for axis, size in enumerate(tensor.shape)]
            bounds = [_bounds(dim, LETTERS[name]) for dim in dims]
            profile.set_shape(tensor.name, *(tuple(bound[which] for bound in bounds) for which in range(3)))
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    assert plan is not None, log.lines
    return bytes(plan)
