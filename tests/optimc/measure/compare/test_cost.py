"""What a million tokens cost, and how a ladder is told in the table."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from optimc.measure.compare.columns import columns_of
from optimc.measure.compare.cost import Price, cost_per_million, row_cost, sellable_tokens_per_s
from optimc.measure.compare.measurement import Measurement
from optimc.measure.compare.row import Row
from optimc.measure.evaluation import EvalResult
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.knee import Knee
from optimc.measure.store import LoadFigures
from optimc.measure.workload import Workload


@dataclass
class Result:
    goodput: Goodput


@dataclass
class Step:
    rate_per_s: float
    result: Result


@dataclass
class Ladder:
    steps: tuple[Step, ...]
    knee: Knee
    workload: Workload = field(default_factory=lambda: Workload(output_tokens=100))


def load(concurrency, tokens_per_s):
    return LoadFigures(concurrency, 8, 0, 1.0, 1.0, None, 1.0, 1.0, None, tokens_per_s, 1.0, ())


def measurement(*loads, ladder: Any = None):
    return Measurement(loads, EvalResult(10.0, None, None, None, 7), ladder, ())


# At 4 requests a second 3 of 4 keep the limits; at the knee, 2/s, all but a tenth do: 1.8/s of 100 tokens.
STEPS = (
    Step(2.0, Result(Goodput(54, 60, 1.8, {}))),
    Step(4.0, Result(Goodput(45, 60, 3.0, {}))),
)
LADDER = Ladder(STEPS, Knee(2.0, 4.0, "ttft", "queueing"))


def test_the_price_of_a_million_tokens_by_hand():
    # 3.60 an hour is 0.001 a second; a million tokens at 50/s take 20,000 s.
    assert cost_per_million(3.6, 50) == pytest.approx(20)


def test_without_a_ladder_the_best_concurrency_counts():
    assert sellable_tokens_per_s(measurement(load(1, 20.0), load(8, 50.0), load(16, 45.0))) == 50
    assert row_cost(Price(3.6), measurement(load(1, 20.0), load(8, 50.0))) == pytest.approx(20)
    assert row_cost(Price(3.6), measurement(load(1, None))) is None


def test_with_a_ladder_only_tokens_within_the_limits_at_the_knee_count():
    assert sellable_tokens_per_s(measurement(load(8, 999.0), ladder=LADDER)) == pytest.approx(180)
    none = replace(LADDER, knee=Knee(None, 2.0, "ttft", "queueing"))
    assert sellable_tokens_per_s(measurement(load(8, 999.0), ladder=none)) is None


@pytest.mark.parametrize(
    ("knee", "shown"),
    [
        (Knee(2.0, 4.0, "ttft", ""), ["2", "ttft"]),
        (Knee(4.0, None, "nothing", ""), ["≥ 4", "nothing"]),
        (Knee(None, 2.0, "tpot", ""), ["none", "tpot"]),
    ],
)
def test_the_knee_in_the_table(tmp_path, knee, shown):
    row = Row("a", tmp_path, 1, measurement(load(1, 5.0), ladder=replace(LADDER, knee=knee)), ())
    cells = {column.head: column.cell(row) for column in columns_of([row], None)}
    assert [cells["knee /s"], cells["broke"]] == shown
