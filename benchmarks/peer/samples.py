"""What was measured: per metric and engine one value a round, so that engines are compared within a round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from peer.burst import Workload
from peer.machine_probe import MachineState


class Measurable(Protocol):
    """An engine with its model loaded."""

    def measure(self, workload: Workload, seed: int, /) -> float:
        """Return the workload's figure, tokens per second, on prompts no other seed gives."""
        ...


@dataclass
class Samples:
    """Of one section."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Metric to engine to one value per round."""
    states: list[MachineState] = field(default_factory=list)
    """The machine before each round and after the last."""
    versions: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    """Engine to how it was started, without local paths."""
    notes: list[str] = field(default_factory=list)

    def add(self, metric: str, engine: str, value: float) -> None:
        self.values.setdefault(metric, {}).setdefault(engine, []).append(value)

    def median(self, metric: str, engine: str) -> float | None:
        """None if it was not measured."""
        values = self.values.get(metric, {}).get(engine)
        return statistics.median(values) if values else None

    def ratio(self, ours: tuple[str, str], others: Sequence[tuple[str, str]]) -> float | None:
        """Return the median over rounds of our value over the best of the others', each a (metric, engine); None if
        one of them was not measured. Speeds of one round lie seconds apart, those of two may be of two machines."""
        series = [self.values.get(metric, {}).get(engine) for metric, engine in (ours, *others)]
        if not all(series) or not others:
            return None
        rounds = zip(*(values for values in series if values), strict=True)
        return float(statistics.median(own / max(rest) for own, *rest in rounds))

    def to_json(self) -> dict[str, Any]:
        return {
            "values": self.values,
            "states": [state.to_json() for state in self.states],
            "versions": self.versions,
            "commands": self.commands,
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Samples:
        states = [MachineState(**state) for state in data["states"]]
        return cls(data["values"], states, data["versions"], data["commands"], data["notes"])


def alternate(
    samples: Samples,
    metrics: Mapping[str, Workload],
    engines: Mapping[str, Measurable],
    rounds: int,
    probe: Callable[[], MachineState],
) -> None:
    """Measure every metric with every engine in turn (A B C A B C ...), `rounds` times after one that does not count:
    in it caches fill and shapes are seen for the first time."""
    for number in range(rounds + 1):
        if number:
            samples.states.append(probe())
        for metric, workload in metrics.items():
            for name, engine in engines.items():
                value = engine.measure(workload, number)
                if number:
                    samples.add(metric, name, value)
    samples.states.append(probe())
