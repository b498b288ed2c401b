"""Loops of many small tensor operations run faster on one thread than on several that wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block.

    Where each element of a result is computed from its own inputs alone, the number of threads does not show in it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
