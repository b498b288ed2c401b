"""When the requests of an open loop are sent: moments that seed and rate determine, whatever the server does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimc.measure.prompts import seed_of
from optimc.measure.workload import Workload


def arrival_times(workload: Workload, count: int, trace: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Return `count` moments in seconds from the start, ascending. More of them begin with the same ones.

    poisson: gaps are exponential and independent of each other, as of many users who do not know of each other.
    constant: every 1 / rate. trace: as recorded, from its first request on, `rate_scale` times as fast.
    """
    if workload.arrival == "trace":
        assert trace is not None, "a trace has moments"
        recorded = np.asarray(trace[:count], np.float64)
        return (recorded - recorded[:1]) / workload.rate_scale
    assert workload.rate_per_s is not None, "Workload checks it"
    if workload.arrival == "constant":
        return np.arange(count) / workload.rate_per_s
    generator = np.random.default_rng(seed_of("arrivals", str(workload.seed)))
    return np.cumsum(generator.exponential(1 / workload.rate_per_s, count))
