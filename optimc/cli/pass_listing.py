"""What a pass did, layer by layer, as text: errors, sizes, fallbacks, what it cost, what it could have chosen.

`optimc inspect PLAN --layers` prints all of it, `optimc build` quality and frontier (`pass_summary`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from optimc.cli.format import format_bytes
from optimc.plan import FrontierPoint, LayerReport, PassQuality, PassReport

WORST = 8
"""Layers listed before they are only counted: those with the largest errors."""

_LAYER = 40
"""Width of the column of names; a line without a note has at most 100 characters."""


def pass_lines(report: PassReport) -> Iterator[str]:
    """Yield what a pass's report holds beside its figures; nothing for a pass that says no more.

    Layers come with the largest error first, `WORST` at most; those that fell back are listed whatever their error.
    """
    if report.quality is not None:
        yield quality_line(report.quality)
    if report.calibration_tokens is not None:
        yield f"calibrated on {report.calibration_tokens:,} tokens"
    if report.resumed_at is not None:
        yield f"went on at layer {report.resumed_at}, where an earlier build had come to"
    if report.layers:
        yield from _layers(report.layers)
    yield from frontier_lines(report.frontier)


def quality_line(quality: PassQuality) -> str:
    """Say what a pass did to perplexity and to the divergence from the checkpoint."""
    return (
        f"perplexity {quality.perplexity_before:.3f} → {quality.perplexity_after:.3f}, "
        f"KL {quality.kl_before:.4f} → {quality.kl_after:.4f} nats a token, over {quality.tokens:,} tokens"
    )


def frontier_lines(points: Sequence[FrontierPoint]) -> Iterator[str]:
    """List what a budget could have bought, a line each; nothing where there was no choice."""
    if not points:
        return
    yield "choices that no other beats, by the sum of what each layer was measured to cost:"
    yield f"  {'bits':>6} {'size':>11} {'KL':>9}"
    for point in points:
        mark = "  chosen" if point.chosen else ""
        yield f"  {point.bits:>6.2f} {format_bytes(point.nbytes):>11} {point.kl:>9.4f}{mark}"


def pass_json(report: PassReport) -> dict[str, Any]:
    """Return the report's parts that `pass_lines` shows, whole, as JSON values."""
    data = report.model_dump(mode="json")
    kept = ("name", "quality", "calibration_tokens", "resumed_at", "layers", "frontier")
    return {name: data[name] for name in kept}


def _layers(layers: Sequence[LayerReport]) -> Iterator[str]:
    yield _row("layer", "bits", "group", "error", "damping", "seconds", "size")
    ranked = sorted(layers, key=lambda layer: -1.0 if layer.error is None else layer.error, reverse=True)
    shown = [layer for place, layer in enumerate(ranked) if place < WORST or layer.fallback is not None]
    for layer in shown:
        yield _row(
            layer.layer,
            "dense" if layer.bits is None else str(layer.bits),
            "" if layer.group is None else str(layer.group),
            "" if layer.error is None else f"{layer.error:.2e}",
            "" if layer.damping is None else f"{layer.damping:g}",
            f"{layer.seconds:.1f}",
            f"{format_bytes(layer.bytes_before)} → {format_bytes(layer.bytes_after)}",
        )
        if layer.fallback is not None:
            yield f"    rounded to nearest: {layer.fallback}"
        if layer.note is not None:
            yield f"    {layer.note}"
    before, after = (sum(getattr(layer, name) for layer in layers) for name in ("bytes_before", "bytes_after"))
    more = f"{len(layers) - len(shown)} more (--json shows them); " if len(shown) < len(layers) else ""
    yield f"{more}{len(layers)} in all, {format_bytes(before)} → {format_bytes(after)}"


def _row(layer: str, bits: str, group: str, error: str, damping: str, seconds: str, size: str) -> str:
    name = layer if len(layer) <= _LAYER else f"…{layer[1 - _LAYER :]}"
    return f"{name:<{_LAYER}} {bits:>5} {group:>5} {error:>8} {damping:>7} {seconds:>7}  {size}".rstrip()
