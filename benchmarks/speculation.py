"""What guessing tokens ahead gains on three kinds of text, greedy and sampled, alone and among sixteen.

    python benchmarks/speculation.py PLAN [--mode auto|ngram|medusa|draft=PLAN] [--kinds chat,prose,code] [--rounds N]

Each cell is measured on one engine, with guesses and without in turns, and its median round is judged by what it has to
show. Cells measured earlier stay in the result until they are measured again. Exits with 1 if a target that was
measured is missed.
README.md says how each figure is taken.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from optimc.errors import OptimcError
from optimc.measure.load.traffic import read_traffic
from optimc.measure.machine import read_machine
from optimc.measure.speculation import bench_speculation
from optimc.measure.speculation_result import SpeculationResult
from optimc.measure.workload import Workload
from optimc.plan import Plan
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine

HERE = Path(__file__).parent
KINDS = ("chat", "prose", "code")
"""Answers to questions; technical prose continued; code, tables and lists, which repeat themselves."""
TEMPERATURES = (0.0, 0.7)
BATCHES = (1, 16)
OUTPUT_TOKENS = 256
NEVER_BELOW = 0.97

Outcome = Literal["pass", "fail", "not measured"]


@dataclass(frozen=True)
class Target:
    """Decoding with guesses of `mode` is at least `least` times as fast as without."""

    mode: str
    kind: str
    temperature: float
    batch: int
    least: float


def targets(mode: str) -> list[Target]:
    """Return what a mode has to show: it may never cost, and must gain where it should."""
    gains = {("ngram", "code"): 1.8, ("medusa", "chat"): 1.4, ("auto", "code"): 1.8}
    return [
        Target(mode, kind, temperature, batch, gain if batch == 1 and temperature == 0 else NEVER_BELOW)
        for kind, temperature, batch in itertools.product(KINDS, TEMPERATURES, BATCHES)
        for gain in [gains.get((mode, kind), NEVER_BELOW)]
    ]


MEAN_OF_KINDS = {"medusa": 1.25}
"""Mean speed-up over the kinds of text that a mode has to show, greedy and alone."""


def mean_line(mode: str, cells: dict[str, Any]) -> tuple[str, Outcome]:
    """Return what is said of a mode's mean over the kinds, greedy and alone."""
    found = [cells.get(_name(mode, kind, 0.0, 1)) for kind in KINDS]
    observed = [float(cell["observed_speedup"]) for cell in found if cell is not None]
    least = MEAN_OF_KINDS.get(mode)
    if least is None or len(observed) < len(KINDS):
        return "", "not measured"
    mean = sum(observed) / len(observed)
    outcome: Outcome = "pass" if mean >= least else "fail"
    return f"{mode}, mean of the kinds, temperature 0, batch 1: {mean:.2f} (wanted ≥ {least:g}: {outcome})", outcome


def judge(target: Target, cells: dict[str, Any]) -> tuple[float | None, Outcome]:
    """Return the observed speed-up and whether it suffices."""
    cell = cells.get(_name(target.mode, target.kind, target.temperature, target.batch))
    if cell is None:
        return None, "not measured"
    observed = float(cell["observed_speedup"])
    return observed, "pass" if observed >= target.least else "fail"


def report(data: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Guessing tokens ahead",
        "",
        "Decoding with guesses over decoding without, on one engine in turns: the median round, and the least and the",
        "most of several. Predicted from what was accepted and what steps cost. Accepted: shares by position.",
        "",
        "| mode | text | temperature | batch | observed | wanted | | predicted | tokens/step | accepted | draft ms |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for mode in sorted({cell["mode"] for cell in data["cells"].values()}):
        for target in targets(mode):
            observed, outcome = judge(target, data["cells"])
            where = f"| {mode} | {target.kind} | {target.temperature:g} | {target.batch} |"
            if observed is None:
                lines.append(f"{where} | ≥ {target.least:g} | not measured | | | | |")
                continue
            cell = data["cells"][_name(mode, target.kind, target.temperature, target.batch)]
            accepted = " ".join(f"{rate:.2f}" for rate in cell["acceptance_by_position"][:6])
            mark = "✓ pass" if outcome == "pass" else "✗ fail"
            rounds = cell["rounds"]
            between = f" ({min(rounds):.2f}–{max(rounds):.2f})" if len(rounds) > 1 else ""
            lines.append(
                f"{where} {observed:.2f}{between} | ≥ {target.least:g} | {mark} | {cell['predicted_speedup']:.2f} | "
                f"{cell['tokens_per_step']:.2f} | {accepted} | {cell['draft_ms_per_step']:.3f} |"
            )
    means = [line for mode in MEAN_OF_KINDS if (line := mean_line(mode, data["cells"])[0])]
    lines += ["", *means, "", "Measured:", ""] if means else ["", "Measured:", ""]
    measured = {(cell["plan"], cell["machine"]) for cell in data["cells"].values()}
    lines += [f"- {plan} on {machine}" for plan, machine in sorted(measured)]
    return "\n".join(lines) + "\n"


def main() -> int:
    options = _options()
    data = json.loads(options.output.read_text()) if options.output.exists() else {"cells": {}}
    speculation = SpeculationOptions.parse(options.mode)
    with Plan.open(options.plan) as plan:
        template = ChatTemplate.from_plan(plan)
        engine = Engine.load(plan, EngineConfig(speculation=speculation, threads=options.threads))
    assert engine.tokenizer is not None, "prompts are text"
    with engine:
        engine.profile_steps(1.0)
        for kind, temperature, batch in itertools.product(options.kinds, options.temperatures, options.batches):
            rows = list(read_traffic(HERE / "prompts" / f"{kind}.jsonl"))
            prompts = [row.encode(engine.tokenizer, template) for row in rows]
            config = Workload(
                output_tokens=OUTPUT_TOKENS,
                concurrency=batch,
                requests=max(len(prompts), 2 * batch),
                warmup_requests=1 + batch,
                temperature=temperature,
                ignore_eos=False,  # what comes after an answer's end repeats itself, and would flatter
                prompts=f"{kind}.jsonl",
            )
            name = _name(speculation.mode, kind, temperature, batch)
            try:
                found = [_measured(engine, config, prompts) for _ in range(options.rounds)]
            except OptimcError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return 1
            found.sort(key=lambda result: result.observed_speedup)
            result = found[(len(found) - 1) // 2]
            data["cells"][name] = result.to_json() | {
                "rounds": [each.observed_speedup for each in found],
                "kind": kind,
                "temperature": temperature,
                "batch": batch,
                "plan": engine.manifest.name,
                "machine": str(read_machine()),
                "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            print(f"{name}: {result.observed_speedup:.2f}x ({result.predicted_speedup:.2f}x predicted)", flush=True)
            options.output.parent.mkdir(exist_ok=True)
            options.output.write_text(json.dumps(data, indent=1) + "\n")
            options.output.with_suffix(".md").write_text(report(data))
    print(report(data))
    outcomes = [judge(target, data["cells"])[1] for target in targets(speculation.mode)]
    return int("fail" in (*outcomes, mean_line(speculation.mode, data["cells"])[1]))


def _measured(engine: Engine, config: Workload, prompts: list[list[int]]) -> SpeculationResult:
    result = bench_speculation(engine, config, prompts=prompts).speculation
    assert result is not None
    return result


def _name(mode: str, kind: str, temperature: float, batch: int) -> str:
    return f"{mode}, {kind}, temperature {temperature:g}, batch {batch}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--mode", default="auto", help="as `optimc serve --speculation`")
    parser.add_argument("--kinds", type=_words, default=KINDS)
    parser.add_argument("--temperatures", type=_numbers, default=TEMPERATURES)
    parser.add_argument("--batches", type=lambda text: tuple(map(int, text.split(","))), default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell is measured")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "speculation.json")
    return parser.parse_args()


def _words(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if unknown := set(words) - set(KINDS):
        raise argparse.ArgumentTypeError(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    return words


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
