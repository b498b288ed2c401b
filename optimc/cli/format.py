"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit: 513.2 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
