"""A plan's KV cache in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from optimc.plan import KvLayer, KvLayout


def describe_kv(kv: KvLayout) -> str:
    """Say what layers hold, where keys have scales of channels, and where those come from."""
    dtypes = Counter(map(kv.dtype_of, range(len(kv.layers))))
    held = [f"{dtype} in {_layers(count)}" for dtype, count in dtypes.most_common()]
    parts = [", ".join(held) if len(held) > 1 else next(iter(dtypes))]
    channel = [layer for layer in kv.layers if layer.keys == "channel"]
    if channel:
        where = "all layers" if len(channel) == len(kv.layers) else _layers(len(channel))
        parts.append(f"keys per channel in {where}, {_origin(channel)}")
    return "; ".join(parts)


def _origin(layers: Iterable[KvLayer]) -> str:
    """Say where scales of channels come from: every one of them has one of two origins."""
    origins = Counter(
        "uncalibrated" if layer.provenance == "default" else f"calibrated on {layer.calibration_tokens:,} tokens"
        for layer in layers
    )
    if len(origins) == 1:
        return next(iter(origins))
    return ", ".join(f"{_layers(count)} {origin}" for origin, count in sorted(origins.items(), reverse=True))


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"
