"""From values to places: linear and logarithmic scales whose ticks are numbers people would choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] of values to [start, end] of places."""

    kind: Literal["linear", "log"]
    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    """Ascending, all within [low, high]."""

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        if self.kind == "log":
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def label(self, tick: float) -> str:
        """Return a tick as text."""
        return format_tick(tick)


def linear(values: Sequence[float], start: float, end: float, *, from_zero: bool = False, count: int = 5) -> Scale:
    """Return a scale that holds the values, with about `count` ticks in steps of 1, 2 or 5 times a power of ten.

    Its ends are ticks. `from_zero` makes it begin at 0 unless a value is below.
    """
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        # One value: room on both sides, so that it stands in the middle.
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    step = nice_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(_rounded(i * step, step) for i in range(first, last + 1))
    return Scale("linear", ticks[0], ticks[-1], start, end, ticks)


def log(values: Sequence[float], start: float, end: float, *, count: int = 6) -> Scale:
    """Return a logarithmic scale that holds the values, all above 0.

    Ticks are powers of ten; with less than two decades also 2 and 5 times them; with too many, every n-th decade.
    """
    low, high = min(values), max(values)
    if low <= 0:
        raise ValueError(f"a logarithmic scale needs values above 0, got {low}")
    room = (high / low) ** 0.06 if high > low else 2.0
    low, high = low / max(room, 1.02), high * max(room, 1.02)
    decades = math.log10(high / low)
    if decades < 0.7:
        ticks = _within(linear((low, high), 0, 1, count=count).ticks, low, high)
        return Scale("log", low, high, start, end, ticks)
    multiples = (1, 2, 5) if decades < 2.5 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(exponents) / count)) if multiples == (1,) else 1
    ticks = tuple(_power(m, e) for e in exponents if e % every == 0 for m in multiples)
    return Scale("log", low, high, start, end, _within(ticks, low, high))


def nice_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below `rough`, which is above 0."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((m * power for m in (1, 2, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)


def format_tick(value: float) -> str:
    """Return a round number in few characters: 0, 250, 1,500, 0.05, 1e-06."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if size < 100 else f"{value:,.6g}"


def _rounded(value: float, step: float) -> float:
    """Return a multiple of the step as the float nearest to its decimal: 0.3, not 0.30000000000000004."""
    return round(value, max(0, 1 - math.floor(math.log10(step))))


def _power(multiple: int, exponent: int) -> float:
    return float(f"{multiple}e{exponent}")


def _within(ticks: Sequence[float], low: float, high: float) -> tuple[float, ...]:
    return tuple(tick for tick in ticks if low <= tick <= high)
