"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping


def format_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit: 513.2 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_metrics(metrics: Mapping[str, float | int | str]) -> list[str]:
    """Write a pass's figures, without those of single layers (their names have a dot); `--json` shows all."""
    return [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in metrics.items()
        if "." not in name
    ]
