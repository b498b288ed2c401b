"""What a check found, and the table of all of them."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

COLUMNS = ("subject", "check", "", "found", "wanted", "seconds")


@dataclass(frozen=True)
class Outcome:
    """What one check found."""

    name: str
    passed: bool | None
    """None: a figure, of which nothing is asked."""
    found: str
    wanted: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """For the JSON."""


Check = Callable[[], Iterator[Outcome]]


@dataclass
class Report:
    """All outcomes, in the order they were found."""

    rows: list[tuple[str, Outcome, float]] = field(default_factory=list)

    @property
    def failed(self) -> int:
        """Checks that did not pass."""
        return sum(outcome.passed is False for _, outcome, _ in self.rows)

    def run(self, subject: str, name: str, check: Check) -> bool:
        """Run a check and keep what it finds; return whether it came to its end.

        Whatever it raises is a finding like others: a machine with a GPU is there for minutes, and the next check may
        say more.
        """
        started_s = time.perf_counter()
        try:
            for outcome in check():
                self._add(subject, outcome, started_s)
                started_s = time.perf_counter()
        except Exception as error:
            words = str(error) or type(error).__name__
            figures = {"error": words, "trace": traceback.format_exc()}
            self._add(subject, Outcome(name, False, words, "no error", figures), started_s)
            return False
        return True

    def table(self) -> str:
        """Return one line for each outcome."""
        marks = {True: "pass", False: "FAIL", None: ""}
        lines = [
            (subject, outcome.name, marks[outcome.passed], outcome.found, outcome.wanted, f"{seconds:.1f}")
            for subject, outcome, seconds in self.rows
        ]
        widths = [max(len(line[i]) for line in (COLUMNS, *lines)) for i in range(len(COLUMNS))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (COLUMNS, *lines)
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return all there is."""
        return [
            {"subject": subject, **asdict(outcome), "seconds": round(seconds, 3)}
            for subject, outcome, seconds in self.rows
        ]

    def _add(self, subject: str, outcome: Outcome, started_s: float) -> None:
        seconds = time.perf_counter() - started_s
        self.rows.append((subject, outcome, seconds))
        mark = {True: "pass", False: "FAIL", None: "    "}[outcome.passed]
        # Said at once: a session that is cut off has shown what it found so far.
        print(f"{mark} {subject}: {outcome.name}: {outcome.found} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def at_most(name: str, value: float, limit: float, unit: str = "", **figures: Any) -> Outcome:
    """Return the outcome of a figure that must not exceed its limit; NaN does."""
    return Outcome(
        name, bool(value <= limit), f"{value:.3g}{unit}", f"<= {limit:.3g}{unit}", {"value": value, **figures}
    )


def at_least(name: str, value: float, limit: float, unit: str = "", **figures: Any) -> Outcome:
    """Return the outcome of a figure that must reach its limit; NaN does not."""
    return Outcome(
        name, bool(value >= limit), f"{value:.3g}{unit}", f">= {limit:.3g}{unit}", {"value": value, **figures}
    )
