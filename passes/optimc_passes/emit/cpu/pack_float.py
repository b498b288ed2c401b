"""A floating-point weight in the bytes that kernels read: see `optimc.plan.cpu_program` for the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc_passes.emit.cpu.panels import into_panels


def pack_float(weight: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the packed bytes of `weight` [N, C] in its own dtype: in a panel, feature after feature of its 32 rows.

    `rows` is the output at each place, -1 for padding.
    """
    panels = into_panels(weight, rows)
    return np.ascontiguousarray(panels.transpose(0, 2, 1)).reshape(-1).view(np.uint8)
