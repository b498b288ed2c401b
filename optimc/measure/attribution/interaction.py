"""How much more, or less, all factors do together than the product of what each does alone."""

from __future__ import annotations

from collections.abc import Mapping

from optimc.measure.attribution.attribution import RowMode
from optimc.measure.attribution.effect import Effect
from optimc.measure.attribution.loads import load_name
from optimc.measure.attribution.paired import METRICS, PairFigures
from optimc.measure.load.interval import sum_of_logs
from optimc.measure.workload import Workload

Measured = tuple[str, RowMode, Workload]
"""Factor, mode and load of a comparison."""


def interaction(
    jobs: Mapping[int, Measured], figures: Mapping[int, PairFigures]
) -> tuple[dict[str, Effect], list[str]]:
    """Return the interaction by "METRIC @ WORKLOAD", and what kept it from being known, in sentences.

    Under each load on which everything was compared with nothing: whole / bare, divided by every factor's own effect
    under that load. Pair i of each is taken together, so that the interval rests on as many values as there are pairs.
    """
    found: dict[str, Effect] = {}
    notes: list[str] = []
    for number, (factor, _, workload) in jobs.items():
        if factor != "all":
            continue
        shape = load_name(workload)
        alone = [
            n for n, (name, mode, load) in jobs.items() if name != "all" and mode == "without" and load == workload
        ]
        missing = [jobs[n][0] for n in [*alone, number] if n not in figures]
        if not alone:
            notes.append(f"no interaction under {shape}: no factor was left out by itself there")
            continue
        if missing:
            notes.append(f"no interaction under {shape}: {', '.join(missing)} not measured")
            continue
        names = {name for name, mode, _ in jobs.values() if name != "all" and mode == "without"}
        elsewhere = sorted(names - {jobs[n][0] for n in alone})
        if elsewhere:
            notes.append(f"the interaction under {shape} holds what has a load of its own: {', '.join(elsewhere)}")
        for metric in METRICS:
            together = figures[number].ratios(metric)
            each = [figures[n].ratios(metric) for n in alone]
            known = [ratios for ratios in each if ratios is not None]
            if together is None or len(known) < len(each):
                continue
            inverse = [[1 / ratio for ratio in ratios] for ratios in known]
            found[f"{metric} @ {shape}"] = Effect.of(sum_of_logs([together, *inverse]))
    return found, notes
