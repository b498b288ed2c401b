"""Is the memory that a build may use enough? Answered from shapes before the first pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimc.errors import ConfigError, Fault
from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass
from optimc_passes.memory import resident_bytes
from optimc_passes.pipeline_options import PipelineOptions, pass_label
from optimc_passes.verify.session import POOL_BYTES

OPTION = "--max-host-bytes"


def check_host_memory(passes: Sequence[Pass[Any]], artifact: Artifact, options: PipelineOptions) -> None:
    """Raise ConfigError if a pass, or what the pipeline does beside it, needs more than `max_host_bytes`.

    Counted are what the process holds now, what each pass says it needs, and the weights that checking a graph's
    numbers holds; not the pages of mapped files, which the system takes back when it wants them.
    """
    if options.max_host_bytes is None:
        return
    needs = {pass_label(pass_, passes): pass_.host_bytes(artifact) for pass_ in passes if pass_.stage != "graph"}
    # Asked last: what looking at shapes loads stays.
    resident = resident_bytes()
    faults = [
        Fault(
            OPTION,
            f"{name} needs {_gib(resident + needed)} ({_gib(resident)} of it the process itself) and "
            f"{_gib(options.max_host_bytes)} are allowed; allow that much, or calibrate on shorter rows",
        )
        for name, needed in needs.items()
        if resident + needed > options.max_host_bytes
    ]
    checking = _checking_bytes(artifact) if options.verify == "numeric" else 0
    if checking and resident + checking > options.max_host_bytes:
        faults.append(
            Fault(
                OPTION,
                f"checking graphs by their numbers needs {_gib(resident + checking)} ({_gib(checking)} of it weights) "
                f"and {_gib(options.max_host_bytes)} are allowed; set `verify: shapes`, or allow that much",
            )
        )
    if faults:
        raise ConfigError("options", faults)


def _checking_bytes(artifact: Artifact) -> int:
    """Return what running a graph on probe tokens holds: its weights in float32, up to what is kept between runs."""
    elements = sum(int(np.prod(weight.shape)) for weight in artifact.checkpoint.weights.values())
    return min(4 * elements, POOL_BYTES)


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
