"""The roofline for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.roofline.roofline import Cell, Roofline


def roofline_table(roofline: Roofline) -> RenderableType:
    """Return one table of all cells, then what the machine does and what the cache holds."""
    table = Table("context", "batch", "TPOT ≥", "TPOT ~", "limited by", "TTFT ≥", "TTFT ~", "tok/s ≤")
    for column in table.columns[:4] + table.columns[5:]:
        column.justify = "right"
    last = None
    for cell in roofline.cells:
        if last is not None and cell.context != last:
            table.add_section()
        last = cell.context
        table.add_row(*_cells(cell))
    return Group(
        Text(f"{roofline.plan}: floors that no run beats (≥) and predictions (~), milliseconds"),
        table,
        _facts(roofline),
        *(Text(f"note: {note}", style="yellow") for note in roofline.notes),
    )


def _cells(cell: Cell) -> list[str]:
    bound = cell.bound
    return [
        f"{cell.context:,}",
        f"{cell.batch}",
        f"{bound.tpot_ms:,.2f}",
        _ms(cell.predicted_tpot_ms),
        bound.limiter,
        _ms(bound.ttft_ms),
        _ms(cell.predicted_ttft_ms),
        f"{cell.batch / bound.tpot_ms * 1e3:,.0f}" if bound.tpot_ms > 0 else "",
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"


def _facts(roofline: Roofline) -> Table:
    first = roofline.cells[0].bound
    facts = [
        (
            "one decode step reads",
            f"{first.weight_bytes / 2**20:,.1f} MiB of weights and, for each token before it, "
            f"{roofline.kv_bytes_per_token / 1024:,.1f} KiB of KV cache",
        ),
        ("the KV cache holds", f"{roofline.kv_capacity_tokens:,} tokens"),
        ("compute-bound from", _crossings(roofline.compute_bound_batch)),
        ("the machine", _machine(roofline.rates, first.weight_bytes)),
    ]
    grid = Table.grid(padding=(0, 2))
    for name, value in facts:
        grid.add_row(name, value)
    return grid


def _crossings(batches: Mapping[int, int | None]) -> str:
    if not any(batches.values()):
        return "no batch up to the plan's most: decoding is limited by memory"
    parts = [
        f"batch {batch} at context {context:,}" if batch is not None else f"no batch at context {context:,}"
        for context, batch in batches.items()
    ]
    return ", ".join(parts)


def _machine(rates: Mapping[str, Any], weight_bytes: int) -> str:
    if "bytes_per_s" in rates:
        peaks = (rates["bytes_per_s"], rates["int8_ops_per_s"], rates["fp16_ops_per_s"])
        return f"{rates['name']}, {_peaks(*peaks)}, from {rates['source']}"
    fitting = [rate for size, rate in rates["bandwidth"] if size <= weight_bytes] or [rates["bandwidth"][0][1]]
    peaks = (fitting[-1], rates["int8_ops_per_s"], rates["float_ops_per_s"])
    where = f"{rates['machine']['cpu']}, {rates['threads']} threads, {rates['instruction_set']}"
    return f"{where}: at best {_peaks(*peaks)} (floors allow 5% more), {rates['source']} {rates['measured_at']}"


def _peaks(bytes_per_s: float, int8_ops_per_s: float, float_ops_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:,.0f} GB/s for so many bytes, {int8_ops_per_s / 1e9:,.0f} Gops/s in 8 bits, "
        f"{float_ops_per_s / 1e9:,.0f} in floating point"
    )
