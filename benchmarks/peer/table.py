"""The report: verdicts first, then every section's figures with the state of the machine they were taken in."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from peer.names import UNITS
from peer.samples import Samples
from peer.targets import Verdict

MARKS = {"pass": "✓ pass", "fail": "✗ fail", "not measured": "not measured"}


def report(title: str, machine: str, measured: Mapping[str, str], sections: Mapping[str, Samples],
           verdicts: Sequence[Verdict]) -> str:  # fmt: skip
    """Return Markdown. `measured` says when each section was."""
    lines = [f"# {title}", "", machine, "", *_verdict_table(verdicts)]
    for name in UNITS:
        if name in sections:
            lines += ["", *_section(name, measured[name], sections[name])]
    return "\n".join(lines) + "\n"


def _verdict_table(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "| target | wanted | measured | |"
    yield "| --- | ---: | ---: | --- |"
    for verdict in verdicts:
        figure = "–" if verdict.figure is None else f"{verdict.figure:.3g}"
        yield f"| {verdict.target} | {verdict.wanted} | {figure} | {MARKS[verdict.outcome]} |"


def _section(name: str, measured: str, samples: Samples) -> Iterator[str]:
    unit = f", {UNITS[name]}" if UNITS[name] else ""
    yield f"## {name}{unit}"
    yield ""
    engines = list(dict.fromkeys(engine for by_engine in samples.values.values() for engine in by_engine))
    yield "| | " + " | ".join(engines) + " |"
    yield "| --- |" + " ---: |" * len(engines)
    for metric, by_engine in samples.values.items():
        yield f"| {metric} | " + " | ".join(spread(by_engine.get(engine, ())) for engine in engines) + " |"
    yield ""
    rounds = max(len(values) for by_engine in samples.values.values() for values in by_engine.values())
    yield f"- measured {measured}; median of {rounds} rounds (lowest–highest)"
    if samples.states:
        yield f"- machine: {states(samples)}"
    yield from (f"- {note}" for note in samples.notes)
    if samples.versions:
        yield "- versions: " + ", ".join(f"{tool} {version}" for tool, version in sorted(samples.versions.items()))
    yield from (f"- {engine}: `{command}`" for engine, command in samples.commands.items())


def spread(values: Sequence[float]) -> str:
    """Return the median and, of several values, the lowest and the highest."""
    if not values:
        return "–"
    middle = _figure(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_figure(min(values))}–{_figure(max(values))})"


def states(samples: Samples) -> str:
    """Return what the machine's probes showed, first to last."""
    barriers = ", ".join(f"{state.barrier_ns:.0f}" for state in samples.states)
    reads = ", ".join(f"{state.read_gb_per_s:.0f}" for state in samples.states)
    return f"barrier {barriers} ns; reads {reads} GB/s"


def _figure(value: float) -> str:
    """Four digits where that is more than three decimals would give."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
