"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_bytes(count: int) -> str:
    """Write a number of bytes with a binary unit: 513.2 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_metrics(metrics: Mapping[str, float | int | str]) -> list[str]:
    """Write a pass's figures in words, `bytes_before: 2048` as "size before 2.0 KiB".

    Those of single layers (their names have a dot) are left out; `--json` shows all.
    """
    return [_format_metric(name.split("_"), value) for name, value in metrics.items() if "." not in name]


def _format_metric(words: list[str], value: float | int | str) -> str:
    if isinstance(value, int) and "bytes" in words:
        return f"{' '.join('size' if word == 'bytes' else word for word in words)} {format_bytes(value)}"
    return f"{' '.join(words)} {value:.3g}" if isinstance(value, float) else f"{' '.join(words)} {value}"


def format_options(options: Mapping[str, Any]) -> str:
    """Write a pass's options as a recipe has them, but for quotes: "bits: 4, symmetric: false, ignore: [lm_head]"."""
    return ", ".join(f"{name}: {_format_option(value)}" for name, value in options.items())


def _format_option(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(_format_option, value))}]" if isinstance(value, (list, tuple)) else str(value)
