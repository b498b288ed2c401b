"""A program under construction: every float value has a buffer of its own, written once, until buffers are shared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from optimc.plan.cpu_program import Op, RowsKind, View
from optimc_passes.emit.cpu.operands import buffers_read, buffers_written, weights
from optimc_passes.emit.cpu.weights import WeightSource


@dataclass(frozen=True)
class FloatRows:
    """A buffer float32 [rows, width]."""

    name: str
    rows: RowsKind
    width: int


@dataclass(frozen=True)
class QuantizedRows:
    """A buffer of activations in 8 bits."""

    name: str
    rows: RowsKind
    features: int
    group: int
    terms: int


@dataclass
class Draft:
    """Operations in order, over buffers without places and weights without bytes."""

    ops: list[Op] = field(default_factory=list)
    buffers: list[FloatRows | QuantizedRows] = field(default_factory=list)
    weights: dict[str, WeightSource] = field(default_factory=dict)
    logits: View | None = None
    """What the program answers, once it is translated."""
    hidden: View | None = None
    """What the output head multiplies, where the program answers that as well."""

    @property
    def answers(self) -> tuple[View, ...]:
        """Return what must be there when the program has ended."""
        assert self.logits is not None, "translation sets it"
        return (self.logits,) if self.hidden is None else (self.logits, self.hidden)

    def new_rows(self, name: str, rows: RowsKind, width: int) -> View:
        """Add a float buffer and return all of it."""
        self.buffers.append(FloatRows(name, rows, width))
        return View(buffer=len(self.buffers) - 1, column=0, width=width)

    def new_quantized(self, name: str, rows: RowsKind, features: int, group: int, terms: int) -> int:
        """Add a quantized buffer and return its index."""
        self.buffers.append(QuantizedRows(name, rows, features, group, terms))
        return len(self.buffers) - 1

    def add_weight(self, name: str, source: WeightSource) -> str:
        """Add a weight and return its key: its name, with the layout where another has the name already."""
        key, count = name, 1
        while key in self.weights:
            key, count = f"{name}.{source.layout}" + (f"{count}" if count > 1 else ""), count + 1
        self.weights[key] = source
        return key

    def rows_of(self, view: View) -> RowsKind:
        """Which rows the view's buffer has."""
        return self.buffers[view.buffer].rows

    def is_whole(self, view: View) -> bool:
        """Whether the view is all of its float buffer."""
        buffer = self.buffers[view.buffer]
        return isinstance(buffer, FloatRows) and view.column == 0 and view.width == buffer.width


class Edit:
    """A draft's operations while some are replaced or removed in place: who writes a buffer, who reads it."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.ops: list[Op | None] = list(draft.ops)
        self._writer: dict[int, int] = {}
        self._readers: dict[int, set[int]] = {}
        self._users: Counter[str] = Counter()
        for place, op in enumerate(draft.ops):
            self._enter(place, op)

    def writer(self, view: View) -> int | None:
        """Return the place of the operation that computes exactly this view, or None."""
        return self._writer.get(view.buffer) if self.draft.is_whole(view) else None

    def sole_writer(self, view: View) -> int | None:
        """Return the place of the operation that computes exactly this view, if one operation alone reads it."""
        return self.writer(view) if len(self.readers(view)) == 1 else None

    def written_at(self, view: View) -> int:
        """Return the place of the operation that writes the view's buffer."""
        return self._writer[view.buffer]

    def readers(self, view: View) -> set[int]:
        """Return the places of the operations that read the view's buffer; the reader of an answer is at -1."""
        answer = {-1} if any(answer.buffer == view.buffer for answer in self.draft.answers) else set()
        return self._readers.get(view.buffer, set()) | answer

    def lay_out(self, key: str, source: WeightSource) -> str:
        """Give a weight another layout for its only user, or for one of several; return the key of the result."""
        if self._users[key] > 1:
            return self.draft.add_weight(key, source)
        self.draft.weights[key] = source
        return key

    def replace(self, place: int, op: Op | None) -> None:
        """Put another operation, or none, at a place."""
        old = self.ops[place]
        if old is not None:
            for buffer in buffers_read(old):
                self._readers[buffer].discard(place)
            for buffer in buffers_written(old):
                del self._writer[buffer]
            self._users.subtract(weights(old))
        self.ops[place] = op
        if op is not None:
            self._enter(place, op)

    def finish(self) -> None:
        """Give the draft what is left."""
        self.draft.ops = [op for op in self.ops if op is not None]

    def _enter(self, place: int, op: Op) -> None:
        for buffer in buffers_read(op):
            self._readers.setdefault(buffer, set()).add(place)
        for buffer in buffers_written(op):
            self._writer[buffer] = place
        self._users.update(weights(op))
