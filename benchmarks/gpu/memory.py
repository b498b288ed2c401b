"""Device memory: what an executor takes while it serves, and whether it gives all back."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.check import Outcome, at_most
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.tensorrt.contexts import MOST_SHAPES
from optimc_runtime.executor.tensorrt.pool import RESERVED_BYTES

LOST = 64 << 20
"""Bytes that loading and closing again may cost: three loads, one of them with kernels compiled for each shape."""


def check_shapes(executor: Executor, free_loaded: int, free_served: int) -> Iterator[Outcome]:
    """Tell what contexts and graphs took since loading, which is what RESERVED_BYTES keeps free for MOST_SHAPES of
    them. Nothing is asked: the first of all steps also loads code that every later one shares."""
    taken, graphs = free_loaded - free_served, getattr(executor, "num_graphs", 0)
    found = f"{taken / 1e6:.0f} MB with {graphs} graphs; {RESERVED_BYTES / 1e6:.0f} MB are kept for {MOST_SHAPES}"
    yield Outcome("device memory of contexts and graphs", None, found, figures={"bytes": taken, "graphs": graphs})


def check_lost(free_before: int, free_closed: int, free_again: int) -> Iterator[Outcome]:
    """Compare free device memory before the first load, after the first close and after the last. What the first load
    takes for good is CUDA's and TensorRT's own; the loads after it must take nothing."""
    kept = (free_before - free_closed) / 1e6
    yield Outcome("device memory kept after the first close", None, f"{kept:.0f} MB", figures={"value": kept})
    yield at_most("device memory lost by loading again", (free_closed - free_again) / 1e6, LOST / 1e6, " MB")
