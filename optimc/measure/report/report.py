"""What an HTML report is made from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optimc.measure.attribution.attribution import Attribution
from optimc.measure.compare.comparison import Comparison
from optimc.measure.load.ladder_result import LadderResult
from optimc.measure.machine import Machine
from optimc.measure.roofline.roofline import Roofline

_SAID_ONCE = frozenset({"definitions", "machine", "config"})
"""Parts of a benchmark's JSON that are the same in every one, or stand in the report already."""


@dataclass(frozen=True, slots=True)
class Report:
    """Whatever was measured; what is None or empty has no section."""

    title: str
    machine: Machine
    comparison: Comparison | None = None
    ladders: Mapping[str, LadderResult] = field(default_factory=dict)
    """By plan."""
    attribution: Attribution | None = None
    rooflines: Mapping[str, Roofline] = field(default_factory=dict)
    """By plan."""
    method: tuple[str, ...] = ()
    """Sentences on how it was done: commands, versions."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures; of ladders and rooflines only what the charts show."""
        return {
            "format": 1,
            "title": self.title,
            "comparison": None if self.comparison is None else _slim(_without_ladders(self.comparison.to_json())),
            "ladders": {name: _ladder(ladder) for name, ladder in self.ladders.items()},
            "attribution": None if self.attribution is None else self.attribution.to_json(),
            "rooflines": {
                name: {**found.to_json(), "rates": {"id": self.machine.id}} for name, found in self.rooflines.items()
            },
            "machine": self.machine.to_json(),
            "method": list(self.method),
        }

    def script(self) -> str:
        """Return the same as text that may stand in a script element, whatever names hold."""
        text = json.dumps(_finite(self.to_json()), separators=(",", ":"), allow_nan=False)
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_ladders(comparison: dict[str, Any]) -> dict[str, Any]:
    return {**comparison, "rows": [{**row, "ladder": None} for row in comparison["rows"]]}


def _ladder(ladder: LadderResult) -> dict[str, Any]:
    steps = [
        {
            "rate_per_s": step.rate_per_s,
            "passes": step.passes,
            "attained": step.attained,
            "ttft_ms": step.result.ttft_ms.to_json(),
            "tpot_ms": step.result.tpot_ms.to_json(),
        }
        for step in ladder.steps
    ]
    return {"knee": ladder.knee.to_json(), "slo": ladder.slo.to_json(), "attain": ladder.attain, "steps": steps}


def _slim(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _slim(part) for name, part in value.items() if name not in _SAID_ONCE}
    return [_slim(part) for part in value] if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """Return JSON values that every reader takes: what is not finite becomes null, keys become text."""
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
