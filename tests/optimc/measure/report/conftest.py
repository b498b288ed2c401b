"""A report with all sections, its figures made up by formula: many plans, hostile names, gaps everywhere."""

from pathlib import Path

import pytest

from optimc.measure.attribution.attribution import Attribution
from optimc.measure.bench_result import BenchResult
from optimc.measure.compare.comparison import Comparison, mark_front
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.cost import Price
from optimc.measure.compare.measurement import Measurement, Origin
from optimc.measure.compare.row import Row
from optimc.measure.evaluation import EvalResult
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.knee import Step, find_knee
from optimc.measure.load.ladder_result import LadderResult
from optimc.measure.load.slo import Slo
from optimc.measure.machine import Machine
from optimc.measure.percentile import Distribution
from optimc.measure.report import Report
from optimc.measure.roofline.bound import Floor
from optimc.measure.roofline.roofline import Cell, Roofline
from optimc.measure.roofline.row_bound import RowBound
from optimc.measure.store import LoadFigures
from optimc.measure.workload import Workload

MACHINE = Machine("Example CPU @ 2.00GHz", 2, None, "", ("avx2", "fma"), 16 << 30, "Linux x86_64")
SLO = Slo(ttft_ms=500, tpot_ms=60)
NAMES = (
    "smollm2-fp32",
    "smollm2-int8",
    "smollm2-int4",
    "smollm2-int4-awq",
    "smollm2-int4-gptq",
    "smollm2-int4-awq-gptq-group-32-with-a-very-long-name-indeed",
    "<script>alert(1)</script>\"'&]]>",
)


def load(concurrency, tpot_ms, *, bound=True):
    floor = RowBound(tpot_ms * 0.6, 0.6, None, None, "memory", tpot_ms * 0.9, "") if bound else None
    figures = dict.fromkeys(("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"), None if tpot_ms is None else tpot_ms * 12)
    return LoadFigures(
        concurrency=concurrency,
        requests=32,
        failures=0,
        tpot_p50_ms=tpot_ms,
        tpot_p90_ms=tpot_ms,
        tpot_p99_ms=None,
        output_tokens_per_s=None if tpot_ms is None else concurrency * 800 / tpot_ms,
        requests_per_s=1.0,
        warnings=(),
        bound=floor,
        **figures,
    )


def row(index, name, *, tpot_ms, kl, mb, problems=(), bound=True, ladder=None):
    quality = EvalResult(12.0 + (kl or 0), 12.0, kl, None if kl is None else 0.9, 8176)
    loads = tuple(load(c, tpot_ms if c == 1 or tpot_ms is None else tpot_ms * 1.7, bound=bound) for c in (1, 8))
    origins = tuple(Origin(what, "2026-11-30T20:00:00+00:00", index % 2 == 0) for what in ("bench @1", "bench @8"))
    return Row(
        name, Path(f"/plans/{index}.plan"), int(mb * 1e6), Measurement(loads, quality, ladder, origins), problems
    )


def bench_result(workload, ttft_ms, tpot_ms, met):
    def around(value):
        return Distribution(value * 0.8, value, None, 60)

    return BenchResult(
        description="scripted",
        config=workload,
        machine=MACHINE,
        requests=60,
        failures={},
        ttft_ms=around(ttft_ms),
        tpot_ms=around(tpot_ms),
        itl_ms=around(tpot_ms),
        e2e_ms=around(ttft_ms + 128 * tpot_ms),
        queue_ms=around(1.0),
        cold_ttft_ms=None,
        output_tokens_per_s=100.0,
        output_tokens_per_s_whole_run=100.0,
        requests_per_s=1.0,
        prefill_tokens_per_s=None,
        prefix_hit_rate=None,
        prompt_tokens=None,
        output_tokens=None,
        token_source="ids",
        wall_s=60.0,
        warnings=(),
        goodput=Goodput(met, 60, met / 60, {"ttft": 60 - met, "tpot": 0, "failure": 0}),
        in_flight_thirds=(1.0, 1.0, 1.0),
    )


def ladder(capacity):
    """A queue that fills up as the rate nears its capacity."""
    steps = []
    for rate in (0.5, 0.75, 1.12, 1.7, 2.5, 3.8):
        busy = min(0.97, rate / capacity)
        workload = Workload(arrival="poisson", rate_per_s=rate, slo=SLO)
        ttft = 150 / (1 - busy)
        met = 60 if ttft < 500 else 30
        steps.append(Step.of(rate, bench_result(workload, ttft, 20 / (1 - busy / 2), met), 0.95))
        if steps[-1].passes is False and len(steps) > 1 and steps[-2].passes is False:
            break
    return LadderResult(tuple(steps), find_knee(steps, SLO, 0.95), SLO, 0.95, steps[0].result.config, MACHINE)


def attribution():
    def effect(value, spread, pairs=4):
        low, high = (None, None) if spread is None else (value / spread, value * spread)
        return {"value": value, "low": low, "high": high, "pairs": pairs}

    def one(factor, mode, workload, ttft, tpot, rate, **more):
        metrics = {"ttft_p50": ttft, "tpot_p50": tpot, "tokens_per_s": rate}
        empty = {"kind": "pass", "plan_bytes": None, "kl": None, "kl_difference": None, "na": None, "note": ""}
        return {"factor": factor, "mode": mode, "workload": workload, "metrics": metrics, "plan": "", **empty, **more}

    small, large = "512+64 tokens, concurrency 1", "512+64 tokens, concurrency 8"
    rows = []
    for mode in ("without", "cumulative"):
        for shape in (small, large):
            rows += [
                one("rtn[0]", mode, shape, effect(0.71, 1.04), effect(0.42, 1.03), effect(2.2, 1.05),
                    plan_bytes=[98_000_000, 538_000_000], kl=[0.12, 1e-7]),
                one("target.kv_dtype", mode, shape, effect(1.01, 1.06), effect(0.99, 1.04), effect(1.0, 1.02)),
                one("fuse", mode, shape, effect(0.93, 1.02), effect(0.81, 1.02), effect(1.21, 1.02)),
                one("prefix_cache", mode, shape, effect(1.12, 1.04), effect(1.3, None, 2), None),
            ]  # fmt: skip
        rows.append(one("speculation", mode, "", None, None, None, na="the plan has no heads; --speculation ngram"))
    return Attribution.from_json(
        {
            "format": 1,
            "recipe": "smollm2-int4",
            "base": {"plan_bytes": 98_000_000, "kl": 0.12, "loads": {}},
            "rows": rows,
            "interaction": {f"tpot_p50 @ {small}": effect(1.04, 1.03)},
            "machine": MACHINE.to_json(),
            "method": ["4 pairs of blocks of 8 requests, in turns"],
        }
    )


def roofline(name):
    cells = tuple(
        Cell(b, 576, Floor(4 + b * 0.4, None, "memory" if b < 32 else "compute", 1, 1, 1.0), 6 + b * 0.55, None)
        for b in (1, 2, 4, 8, 16, 32, 64)
    )
    return Roofline(name, {}, cells, {576: 32}, 10_000, 23_040.0)


@pytest.fixture
def full_report():
    ladders = {
        name: ladder(capacity) for name, capacity in zip(NAMES, (1.1, 2.0, 3.1, 3.2, 2.9, 3.0, 0.4), strict=True)
    }
    figures = [
        (41.0, 1e-9, 538), (17.0, 0.0012, 144), (11.9, 0.19, 98), (12.0, 0.12, 98), (12.1, 0.11, 98), (12.6, 0.10, 104),
        (10.9, 2.1, 76),
    ]  # fmt: skip
    rows = [
        row(index, name, tpot_ms=tpot, kl=kl, mb=mb, ladder=ladders[name],
            problems=("max_kl 0.5: measured 2.1",) if kl > 1 else ())
        for index, (name, (tpot, kl, mb)) in enumerate(zip(NAMES, figures, strict=True))
    ]  # fmt: skip
    rows.append(row(7, "unmeasured", tpot_ms=None, kl=None, mb=5, bound=False))
    config = CompareConfig(slo=SLO, ladder=True)
    return Report(
        title="smollm2 & friends",
        machine=MACHINE,
        comparison=Comparison(mark_front(rows), MACHINE, config, Price(0.35)),
        ladders=ladders,
        attribution=attribution(),
        rooflines={name: roofline(name) for name in NAMES[:3]},
        method=("Made by: optimc compare 'recipes/*.yaml' --html out.html",),
    )


@pytest.fixture
def one_row_report():
    """One plan, nothing but perplexity and size."""
    rows = mark_front([row(1, "alone", tpot_ms=None, kl=None, mb=5, bound=False)])
    return Report("alone", MACHINE, Comparison(rows, MACHINE, CompareConfig()))
