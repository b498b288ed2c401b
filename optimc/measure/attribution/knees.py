"""The highest rate that keeps the limits, for each side of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from optimc.measure.attribution.config import AttributeConfig
from optimc.measure.attribution.effect import Effect
from optimc.measure.attribution.engines import Contender, OpenEngine
from optimc.measure.machine import Machine
from optimc.measure.served_engine import ServedEngine
from optimc.measure.store import MeasurementStore, ladder_key
from optimc.measure.workload import Workload

Ladder = Callable[[ServedEngine, Workload, float], Mapping[str, Any]]
"""Climbs a ladder of a workload with limits until fewer than a share of the requests keep them; returns
`LadderResult.to_json()`."""


class Knees:
    """Ladders of engines, each climbed once."""

    def __init__(
        self,
        ladder: Ladder,
        config: AttributeConfig,
        store: MeasurementStore,
        machine: Machine,
        open_engine: OpenEngine,
        fresh: bool,
    ) -> None:
        self._ladder = ladder
        self._config = config
        self._store = store
        self._machine = machine
        self._open_engine = open_engine
        self._fresh = fresh
        self._climbed: dict[str, tuple[float, float] | None] = {}
        self.workload = config.workload(1, slo=config.slo, warmup_requests=None)

    @property
    def name(self) -> str:
        """The load in a few words; the ladder sets its rates."""
        return f"{self.workload.prompt_tokens}+{self.workload.output_tokens} tokens, ladder"

    def effect(self, with_: Contender, without: Contender) -> tuple[Effect | None, str | None]:
        """Return the quotient of both knees, or why there is none. Raises what running an engine raises."""
        knees = []
        for name, contender in (("with", with_), ("without", without)):
            knee = self._knee(contender)
            if knee is None:
                return None, f"no knee {name} it: no rate held, or none failed"
            knees.append(knee)
        return Effect.of_knees(knees[0], knees[1]), None

    def _knee(self, contender: Contender) -> tuple[float, float] | None:
        """Return the rate that held and the one above it that failed, requests/s."""
        key = ladder_key(
            contender.subject, self.workload, contender.switches, self._machine, attain=self._config.attain
        )
        path = str(self._store.path(key))
        if path not in self._climbed:
            found = None if self._fresh else self._store.load(key)
            if found is None:
                engine = self._open_engine(contender.subject.path, contender.switches)
                try:
                    found = self._ladder(engine, self.workload, self._config.attain)
                finally:
                    engine.close()
                self._store.save(key, found)
            rates = found["knee"]["rate_per_s"], found["knee"]["fails_at_per_s"]
            self._climbed[path] = None if None in rates else (float(rates[0]), float(rates[1]))
        return self._climbed[path]
