"""The one way a translation says no."""

from __future__ import annotations


class NoKernelError(Exception):
    """A node cannot be expressed. The message is the reason alone; `lower` adds the node and raises LoweringError."""
