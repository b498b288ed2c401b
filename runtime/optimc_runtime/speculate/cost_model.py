"""What a step costs, by its rows and sequences: measured at start, corrected by every step."""

from __future__ import annotations

from collections.abc import Sequence

MOST_ROWS = 512
"""Rows that are looked up; beyond, the last slope goes on."""
CLIP_SLOW, CLIP_FAST = 0.1, 0.4
"""A step that takes longer or shorter than believed teaches no more than these shares: when others use the machine
steps get slower, never faster."""
CONTEXT_RATE = 0.05
"""How fast the share that is the same for all rows follows: contexts grow, the machine slows down."""
KNOT_RATE = 0.06
"""How fast the share of single rows follows."""
LEAST_SHARE = 0.05
"""Share of what one row was measured to take below which no step is believed to fall: costs stay above 0."""
UNMEASURED: tuple[tuple[int, float], ...] = ((1, 2e-3), (4, 2.4e-3), (8, 4.5e-3), (16, 7e-3), (32, 13e-3))
"""Believed of a machine nobody has measured: the shape that small models in 4 bits have on two cores."""


class CostModel:
    """Seconds of a step of `rows` tokens for B sequences: a table by rows, plus what contexts cost, an equal share for
    each sequence. `knots`: (rows, seconds) measured with one sequence, in any order."""

    def __init__(self, knots: Sequence[tuple[int, float]] = (), per_sequence_s: float = 0.0) -> None:
        measured = dict(sorted(knots or UNMEASURED))
        self._rows = list(measured)
        self._seconds = _rising(list(measured.values()))
        if len(self._rows) == 1:
            self._rows.append(2 * self._rows[0])
            self._seconds.append(2 * self._seconds[0])
        self._per_sequence_s = per_sequence_s
        self._context_s = 0.0
        """What one sequence's steps have come to take beyond what was measured."""
        self._table: list[float] = [self._seconds[0]] * (MOST_ROWS + 1)
        for knot in range(len(self._rows)):
            self._fill(knot)

    def seconds(self, sequences: int, rows: int) -> float:
        """Return what a step is believed to take."""
        table, context_s = self._table, self._context_s + self._per_sequence_s * (sequences - 1)
        if rows <= MOST_ROWS:
            return table[rows] + context_s
        return table[MOST_ROWS] + (table[MOST_ROWS] - table[MOST_ROWS - 1]) * (rows - MOST_ROWS) + context_s

    def by_rows(self, sequences: int, rows: int, count: int) -> list[float]:
        """Return `seconds` of `rows`, `rows` + 1, .. , `rows` + `count`."""
        if rows + count > MOST_ROWS:
            return [self.seconds(sequences, rows + n) for n in range(count + 1)]
        context_s = self._context_s + self._per_sequence_s * (sequences - 1)
        return [seconds + context_s for seconds in self._table[rows : rows + count + 1]]

    def around(self, sequences: int) -> tuple[tuple[int, float], ...]:
        """Return (rows, seconds) of steps of so many sequences: plain ones, and some with more and more guesses."""
        rows = {sequences, *range(sequences + 1, sequences + 5), sequences + 8, 2 * sequences, 4 * sequences}
        return tuple([(count, self.seconds(sequences, count)) for count in sorted(rows)])

    def correct(self, sequences: int, rows: int, seconds: float) -> None:
        """Learn a little from a step."""
        believed = self.seconds(sequences, rows)
        error = min(CLIP_SLOW * believed, max(-CLIP_FAST * believed, seconds - believed))
        if sequences > 1:
            self._per_sequence_s = max(0.0, self._per_sequence_s + CONTEXT_RATE * error / (sequences - 1))
        else:
            least_s = (LEAST_SHARE - 1) * self._seconds[0]
            self._context_s = max(least_s, self._context_s + CONTEXT_RATE * error)
        knots, values = self._rows, self._seconds
        knot = 0
        while knot + 1 < len(knots) and abs(knots[knot + 1] - rows) <= abs(knots[knot] - rows):
            knot += 1
        if knot == 0:
            return  # what the fewest rows take beyond what was believed is no matter of rows
        high = values[knot + 1] if knot + 1 < len(values) else float("inf")
        values[knot] = min(max(values[knot] + KNOT_RATE * error, values[knot - 1]), high)
        self._fill(knot - 1)
        self._fill(knot)

    def _fill(self, knot: int) -> None:
        """Bring the table from a knot to the next one up to date; from the last one to the end."""
        rows, seconds, table = self._rows, self._seconds, self._table
        last = len(rows) - 1
        low = min(knot, last - 1)
        slope = (seconds[low + 1] - seconds[low]) / (rows[low + 1] - rows[low])
        end = MOST_ROWS if knot == last else min(rows[knot + 1], MOST_ROWS)
        for row in range(rows[knot], end + 1):
            table[row] = seconds[knot] + slope * (row - rows[knot])


def _rising(values: list[float]) -> list[float]:
    """Return the nearest values that never fall: more rows never cost less, whatever was measured."""
    runs: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while runs and runs[-1][0] > mean:
            before, length = runs.pop()
            mean, count = (before * length + mean * count) / (length + count), length + count
        runs.append((mean, count))
    return [mean for mean, count in runs for _ in range(count)]
