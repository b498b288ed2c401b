"""What a search found: every trial, the best one, and the frontier of objective and divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from optimc.measure.compare.pareto import pareto_front
from optimc.measure.search.space import Space, Value

FORMAT = 1
TrialState = Literal["measured", "gate", "refused", "failed"]
"""`gate`: a quality gate failed, so no load was sent. `refused`: there is no such recipe. `failed`: it was built or run
in vain."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One point of the space."""

    parameters: Mapping[str, Value]
    state: TrialState
    objective: float | None = None
    """In the objective's unit; None unless measured."""
    kl: float | None = None
    """KL(original || plan), nats per token."""
    plan_bytes: int | None = None
    plan: str = ""
    """Its name."""
    reason: str = ""
    """Why it was not measured."""
    violation: float = 0.0
    """By how much the worst gate is missed, relative to it; 0 if all hold."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """Inverse of `to_json`. Raises TypeError on anything else."""
        return cls(**data)

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return {**asdict(self), "parameters": dict(self.parameters)}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """All trials, in the order of their points' first measurement."""

    recipe: str
    space: Space
    trials: tuple[Trial, ...]
    machine: Mapping[str, Any]
    method: tuple[str, ...] = ()

    @property
    def best(self) -> Trial | None:
        """The trial that keeps the gates and has the best objective; the first of equal ones."""
        measured = self._measured()
        return min(measured, key=self._score) if measured else None

    @property
    def frontier(self) -> tuple[Trial, ...]:
        """Trials that no other beats in objective without being farther from the original, by objective."""
        known = [(trial, (self._score(trial), trial.kl)) for trial in self._measured() if trial.kl is not None]
        marks = pareto_front([costs for _, costs in known])
        return tuple(sorted((trial for (trial, _), best in zip(known, marks, strict=True) if best), key=self._score))

    def to_json(self) -> dict[str, Any]:
        """Return everything; best and frontier as numbers of trials."""
        best = self.best
        return {
            "format": FORMAT,
            "recipe": self.recipe,
            "space": self.space.to_json(),
            "maximised": self.space.maximised,
            "trials": [trial.to_json() for trial in self.trials],
            "best": None if best is None else self.trials.index(best),
            "frontier": [self.trials.index(trial) for trial in self.frontier],
            "machine": dict(self.machine),
            "method": list(self.method),
        }

    def table(self) -> RenderableType:
        """Return the report for a terminal: best first, then those that were measured, then the others with reasons."""
        direction = "more is better" if self.space.maximised else "less is better"
        objective = self.space.objective
        table = Table("", *_short(list(self.space.choices)), objective, "KL", "MB", title=f"{objective}, {direction}")
        for column in table.columns:
            column.overflow = "fold"  # paths and figures are nothing without their ends
        front, best = self.frontier, self.best
        for trial in sorted(self._measured(), key=self._score):
            mark = "best" if trial is best else "front" if trial in front else ""
            table.add_row(mark, *self._values(trial), *_figures(trial))
        parts: list[RenderableType] = [self._headline(), *([table] if best is not None else [])]
        parts += [
            Text(f"{trial.state}: {_point(trial)}: {trial.reason}", style="yellow")
            for trial in self.trials
            if trial.state != "measured"
        ]
        return Group(*parts, Text("\n".join(self.method), style="dim"))

    def _headline(self) -> Text:
        best = self.best
        tried = f"{len(self.trials)} of {self.space.size} points tried"
        if best is None:
            return Text(f"{self.recipe}: no point keeps the gates and could be measured; {tried}", style="bold red")
        figure = f"{best.objective:,.4g}"
        return Text(f"{self.recipe}: best {self.space.objective} {figure} with {_point(best)}; {tried}", style="bold")

    def _values(self, trial: Trial) -> list[str]:
        return [str(trial.parameters.get(path, "")) for path in self.space.choices]

    def _measured(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.state == "measured" and trial.objective is not None]

    def _score(self, trial: Trial) -> float:
        """Smaller is better."""
        assert trial.objective is not None
        return -trial.objective if self.space.maximised else trial.objective


def _short(paths: Sequence[str]) -> list[str]:
    """Paths without the words that say nothing here."""
    return [path.removeprefix("passes.").removeprefix("target.") for path in paths]


def _figures(trial: Trial) -> tuple[str, str, str]:
    size = "n/a" if trial.plan_bytes is None else f"{trial.plan_bytes / 1e6:,.1f}"
    return f"{trial.objective:,.4g}", "n/a" if trial.kl is None else f"{trial.kl:.3g}", size


def _point(trial: Trial) -> str:
    return ", ".join(f"{path} {value}" for path, value in trial.parameters.items())
