"""Raising the rate step by step until the limits break, then closing in on the knee.

1. A closed loop shows what is served at all; the first rate is a quarter of that.
2. Each step raises the rate by half, until two in a row fail. If none has passed by then, each step halves the first
   rate, until one passes or the rate is next to nothing.
3. The gap between the highest rate that passes and the lowest one above it that fails is halved (geometrically), until
   they differ by at most 10%.
4. A rate that fails below one that passes is measured once more; failing twice stands, and is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from optimc.errors import ConfigError, Fault
from optimc.measure.bench_result import BenchResult
from optimc.measure.load.knee import Step, find_knee
from optimc.measure.load.ladder_result import LadderResult
from optimc.measure.workload import Workload
from optimc.progress import Progress, no_progress

SEARCH_VERSION = 2
"""Raise it when rates are searched otherwise; ladders that were kept are then climbed again."""
START_SHARE = 0.25
"""Of what a closed loop is served, where the search begins."""
FACTOR = 1.5
DOWN_FACTOR = 0.5
LEAST_SHARE = 0.01
"""Of what a closed loop is served: where even that is too much, requests hardly meet, and no lower rate helps them."""
CLOSE_ENOUGH = 1.10
"""Failing over passing rate at which the knee is known."""


def check_ladder(workload: Workload, attain: float, rates: Sequence[float] | None) -> None:
    """Raise ConfigError, with all faults, for what no ladder can be made of."""
    faults = []
    if workload.slo is None:
        faults.append(Fault("--ladder", "needs --slo: without a limit no rate is too high"))
    if not 0 < attain <= 1:
        faults.append(Fault("--attain", f"must be a share above 0 and at most 1, got {attain:g}"))
    if rates is not None and not rates:
        faults.append(Fault("--rates", "names no rate"))
    for rate in rates or ():
        if not 0 < rate < math.inf:
            faults.append(Fault("--rates", f"{rate:g} is not above 0"))
            continue
        refusal = _refusal(workload, rate)
        if refusal is not None:
            faults.append(Fault("--rates", f"{rate:g}: {refusal}"))
    if workload.arrival == "trace":
        faults.append(Fault("--ladder", "sets the rate itself, and a trace has its own; use poisson or constant"))
    if faults:
        raise ConfigError("options", faults)


def run_ladder(
    bench: Callable[[Workload], BenchResult],
    workload: Workload,
    *,
    attain: float = 0.95,
    rates: Sequence[float] | None = None,
    max_steps: int = 14,
    concurrency: int = 16,
    progress: Progress = no_progress,
) -> LadderResult:
    """Measure until the knee is known. `bench` runs one load and empties the prefix cache before.

    `rates`, requests/s: exactly these, instead of a search of at most `max_steps` measurements. `concurrency`: of the
    closed loop that shows the capacity, at most the engine's sequences. The workload's own arrival may be "closed"
    (then poisson is used), its rate does not matter. Raises ConfigError before anything runs.
    """
    check_ladder(workload, attain, rates)
    return _Ladder(bench, workload, attain, max_steps, progress).run(rates, concurrency)


class _Ladder:
    def __init__(
        self,
        bench: Callable[[Workload], BenchResult],
        workload: Workload,
        attain: float,
        max_steps: int,
        progress: Progress,
    ) -> None:
        self._bench = bench
        self._workload = workload
        self._attain = attain
        self._max_steps = max_steps
        self._progress = progress
        self._steps: dict[float, Step] = {}
        self._measured = 0
        self._again: set[float] = set()
        self._warnings: list[str] = []

    def run(self, rates: Sequence[float] | None, concurrency: int) -> LadderResult:
        closed = None
        if rates is not None:
            self._max_steps = max(self._max_steps, 2 * len(rates))  # each may be measured twice
            for rate in sorted(set(rates)):
                self._measure(rate)
        else:
            closed = self._bench(_closed(self._workload, concurrency))
            self._climb(START_SHARE * closed.requests_per_s)
            self._descend(closed.requests_per_s)
            self._close_in()
        self._measure_again()
        if rates is None:
            self._close_in()  # the second measurement may have moved the knee
        ordered = [self._steps[rate] for rate in sorted(self._steps)]
        slo = self._workload.slo
        assert slo is not None, "check_ladder refuses"
        return LadderResult(
            steps=tuple(ordered),
            knee=find_knee(ordered, slo, self._attain),
            slo=slo,
            attain=self._attain,
            workload=_open(self._workload, ordered[0].rate_per_s),
            machine=ordered[0].result.machine,
            closed=closed,
            warnings=tuple(self._warnings),
        )

    def _climb(self, rate: float) -> None:
        """Raise the rate until two in a row fail."""
        failed = 0
        while failed < 2 and self._measured < self._max_steps:
            refusal = _refusal(self._workload, rate) if self._steps else None
            if refusal is not None:
                self._warnings.append(f"no rate above {rate / FACTOR:.3g}/s was tried: {refusal}")
                return
            failed = 0 if self._measure(rate).passes else failed + 1
            rate *= FACTOR

    def _descend(self, served_per_s: float) -> None:
        """Halve the lowest rate until one passes, if none has."""
        while not any(step.passes for step in self._steps.values()):
            lowest = min(self._steps)
            rate = DOWN_FACTOR * lowest
            stop = _refusal(self._workload, rate)
            if rate < LEAST_SHARE * served_per_s:
                stop = f"that is next to nothing of the {served_per_s:.3g}/s that a closed loop is served"
            elif self._measured >= self._max_steps:
                stop = f"{self._max_steps} measurements are the most"
            if stop is not None:
                self._warnings.append(f"no rate passes, and none below {lowest:.3g}/s was tried: {stop}")
                return
            self._measure(rate)

    def _close_in(self) -> None:
        """Narrow the gap above the highest passing rate."""
        while self._measured < self._max_steps:
            passing, failing = self._bracket()
            if passing is None or failing is None or failing / passing <= CLOSE_ENOUGH:
                return
            self._measure(math.sqrt(passing * failing))

    def _measure_again(self) -> None:
        """Give a failing rate below a passing one a second chance: a neighbour on the machine fails a step too."""
        passing, _ = self._bracket()
        for rate in sorted(rate for rate, step in self._steps.items() if not step.passes):
            if passing is None or rate > passing or rate in self._again:
                continue
            if self._measured >= self._max_steps:
                self._warnings.append(
                    f"not monotone: {rate:.3g}/s failed, though {passing:.3g}/s passes; {self._max_steps} measurements "
                    "are the most, so it was not tried again"
                )
                return
            self._again.add(rate)
            if not self._measure(rate).passes:
                self._warnings.append(
                    f"not monotone: {rate:.3g}/s failed twice, though {passing:.3g}/s passes; take the knee with care"
                )

    def _bracket(self) -> tuple[float | None, float | None]:
        """Return the highest passing rate and the lowest failing one above it."""
        passing = max((rate for rate, step in self._steps.items() if step.passes), default=None)
        above = [rate for rate, step in self._steps.items() if not step.passes and rate > (passing or 0)]
        return passing, min(above, default=None)

    def _measure(self, rate: float) -> Step:
        self._progress(self._measured, self._max_steps, "ladder")
        step = Step.of(rate, self._bench(_open(self._workload, rate)), self._attain)
        self._steps[rate] = step
        self._measured += 1
        self._progress(self._measured, self._max_steps, "ladder")
        return step


def _open(workload: Workload, rate: float) -> Workload:
    arrival = "poisson" if workload.arrival == "closed" else workload.arrival
    warmup = workload.warmup_requests if workload.is_open else None
    return replace(workload, arrival=arrival, rate_per_s=rate, concurrency=1, warmup_requests=warmup)


def _refusal(workload: Workload, rate: float) -> str | None:
    """Return why the load cannot be sent at this rate, or None."""
    try:
        _open(workload, rate)
    except ConfigError as error:
        return "; ".join(f"{fault.where} {fault.message}" for fault in error.faults)
    return None


def _closed(workload: Workload, concurrency: int) -> Workload:
    """Return the closed loop that shows what is served at all; as many requests as a closed loop takes by itself."""
    return replace(
        workload,
        arrival="closed",
        rate_per_s=None,
        concurrency=concurrency,
        duration_s=None,
        requests=None,
        warmup_requests=None,
    )
