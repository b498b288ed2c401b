"""Where the labels of points go, so that none lies on another, on a mark or outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINE_HEIGHT = 14.0
"""Of a label, in the units of the chart."""
CHARACTER_WIDTH = 7.6
"""Of an average character at 12.5 units; wider than most, so that estimated boxes hold their text."""
MOST_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    def outside(self, frame: Box) -> float:
        """Return the area of it that `frame` does not hold."""
        return (self.right - self.left) * (self.bottom - self.top) - self.overlap(frame)


@dataclass(frozen=True, slots=True)
class Point:
    """A mark that wants a label."""

    x: float
    y: float
    radius: float
    label: str

    @property
    def box(self) -> Box:
        """What the mark covers."""
        return Box(self.x - self.radius, self.y - self.radius, self.x + self.radius, self.y + self.radius)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a label begins, on its base line, and whether it is so far off that a line must lead to it."""

    x: float
    y: float
    box: Box
    is_far: bool


def place_labels(points: Sequence[Point], frame: Box) -> list[Place]:
    """Return a place for each label: the first of several about its mark where it lies on nothing and within `frame`.

    Greedy, in the order of the points from the top; where no place is free, that with the least overlap is taken.
    """
    taken = [point.box for point in points]
    places: dict[int, Place] = {}
    for index in sorted(range(len(points)), key=lambda i: (points[i].y, points[i].x, i)):
        point = points[index]
        own = point.box
        others = [box for box in taken if box != own]
        candidates = _candidates(point)
        best = min(
            range(len(candidates)),
            key=lambda i: (
                round(sum(candidates[i].box.overlap(box) for box in others) + 4 * candidates[i].box.outside(frame), 3),
                i,
            ),
        )
        places[index] = candidates[best]
        taken.append(candidates[best].box)
    return [places[index] for index in range(len(points))]


def _candidates(point: Point) -> list[Place]:
    """Return places about a mark: right, left, above, below, then the same further and further off."""
    width = len(point.label) * CHARACTER_WIDTH
    near = point.radius + 4
    sides: list[tuple[float, float, bool]] = [
        (near, 0, False),
        (-near - width, 0, False),
        (-width / 2, -near - LINE_HEIGHT / 2, False),
        (-width / 2, near + LINE_HEIGHT / 2, False),
    ]
    for step in range(1, 9):
        dy = step * LINE_HEIGHT
        far = step > 1
        sides += [
            (near + 4, -dy, far),
            (near + 4, dy, far),
            (-near - 4 - width, -dy, far),
            (-near - 4 - width, dy, far),
        ]
        sides += [(-width / 2, -near - dy, far), (-width / 2, near + dy, far)]
    places = []
    for dx, dy, is_far in sides:
        left, middle = point.x + dx, point.y + dy
        box = Box(left, middle - LINE_HEIGHT / 2, left + width, middle + LINE_HEIGHT / 2)
        places.append(Place(left, middle + 4.2, box, is_far))
    return places


def short_names(names: Sequence[str]) -> list[str]:
    """Return names as a chart has room for them: without the beginning they share, and at most 24 characters.

    Only whole parts before a "-" or "_" or "/" are left off, and only when something is left of each.
    """
    cut = 0
    if len(set(names)) > 1:
        common = _common_prefix(names)
        cut = max(common.rfind(mark) for mark in "-_/") + 1
        if any(len(name) <= cut for name in names):
            cut = 0
    return [shorten(name[cut:]) for name in names]


def shorten(name: str, most: int = MOST_CHARACTERS) -> str:
    """Return a name of at most `most` characters; of a longer one, both ends."""
    if len(name) <= most:
        return name
    head = (most - 1) // 2
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]
