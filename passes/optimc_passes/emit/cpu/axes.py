"""The axes of an array with one axis of rows: pure arithmetic on shapes.

Every function raises `NoKernelError` with a reason if the result has no single axis of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optimc_passes.emit.cpu.no_kernel import NoKernelError


@dataclass(frozen=True)
class Axes:
    """`lead` axes of size 1, the axis of rows, and the axes of a row."""

    lead: int
    inner: tuple[int, ...]

    @property
    def width(self) -> int:
        """Elements per row."""
        return math.prod(self.inner)

    @property
    def rank(self) -> int:
        """Axes altogether."""
        return self.lead + 1 + len(self.inner)

    def show(self, rows: str) -> str:
        """Return the shape in words."""
        return f"[{', '.join([*['1'] * self.lead, rows, *map(str, self.inner)])}]"

    def positive(self, axis: int) -> int:
        """Return an axis counted from the front."""
        return axis + self.rank if axis < 0 else axis


def reshape(axes: Axes, target: Sequence[int], *, allow_zero: bool) -> Axes:
    """Return the axes after Reshape to `target`, where -1 is what remains and, without `allow_zero`, 0 what was."""
    shape: list[int | None] = []  # None is the axis of rows
    for place, size in enumerate(target):
        if size == 0 and not allow_zero and place < axes.rank:
            size = 1 if place < axes.lead else 0
            shape.append(None if place == axes.lead else size or axes.inner[place - axes.lead - 1])
        else:
            shape.append(size)
    if None not in shape:
        if -1 not in shape:
            raise NoKernelError(f"a shape of {list(target)} leaves no axis of rows")
        shape[shape.index(-1)] = None
    row = shape.index(None)
    if any(size != 1 for size in shape[:row]):
        raise NoKernelError(f"{list(target)} splits or moves the axis of rows")
    inner = [size for size in shape[row + 1 :] if size is not None]
    if -1 in inner:
        known = -math.prod(inner)
        if known <= 0 or axes.width % known:
            raise NoKernelError(f"{list(target)} does not divide rows of {axes.width}")
        inner[inner.index(-1)] = axes.width // known
    if math.prod(inner) != axes.width:
        raise NoKernelError(f"{list(target)} mixes rows of {axes.width} elements")
    return Axes(row, tuple(inner))


def unsqueeze(axes: Axes, new: Sequence[int]) -> Axes:
    """Return the axes after inserting axes of size 1 at the places `new` of the result."""
    rank = axes.rank + len(new)
    places = {place % rank for place in new}
    old = iter([*[1] * axes.lead, None, *axes.inner])
    return _read([1 if place in places else next(old) for place in range(rank)])


def squeeze(axes: Axes, removed: Sequence[int] | None) -> Axes:
    """Return the axes after removing those of size 1 at `removed`, or all of them."""
    shape = [*[1] * axes.lead, None, *axes.inner]
    places = (
        {place for place, size in enumerate(shape) if size == 1}
        if removed is None
        else {axes.positive(place) for place in removed}
    )
    if any(shape[place] != 1 for place in places):
        raise NoKernelError(f"axes {sorted(places)} are not all of size 1")
    return _read([size for place, size in enumerate(shape) if place not in places])


def columns(axes: Axes, axis: int, start: int, stop: int) -> tuple[Axes, int]:
    """Return the axes of a slice [start, stop) along `axis`, and the first element of a row it takes.

    The axis must be the first of a row, or the slice would not be neighbouring elements.
    """
    if axes.positive(axis) != axes.lead + 1 or not axes.inner:
        raise NoKernelError(f"axis {axis} is not the first of a row")
    size, *rest = axes.inner
    if not 0 <= start < stop <= size:
        raise NoKernelError(f"[{start}, {stop}) is not inside {size}")
    return Axes(axes.lead, (stop - start, *rest)), start * math.prod(rest)


def _read(shape: Sequence[int | None]) -> Axes:
    row = list(shape).index(None)
    assert all(size == 1 for size in shape[:row]), shape
    return Axes(row, tuple(size for size in shape[row + 1 :] if size is not None))
