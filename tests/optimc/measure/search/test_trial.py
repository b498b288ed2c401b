"""One trial: quality before load, and nothing measured twice."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from optimc.errors import ConfigError, Fault, LoweringError, StorageError
from optimc.measure.evaluation import EvalResult
from optimc.measure.machine import Machine
from optimc.measure.percentile import Distribution
from optimc.measure.search.space import Space
from optimc.measure.search.trial import TrialRunner, violation
from optimc.measure.store import MeasurementStore
from optimc.measure.workload import Workload
from optimc.plan import PlanTensor, write_plan
from optimc.recipe import QualitySpec, Recipe

MACHINE = Machine("a cpu", 2, None, "", (), 1 << 34, "Linux")
SPACE = Space({"bits": (4, 8), "serve.max_seqs": (1, 2)})


@dataclass
class Bench:
    """Counts runs; TPOT 5 ms, TTFT 50 ms, 200 tokens/s."""

    failures: int = 0
    runs: int = 0

    def __call__(self, _engine, workload, _progress):
        self.runs += 1
        slow, fast = Distribution(50.0, 50.0, None, 8), Distribution(5.0, 5.0, None, 8)
        return SimpleNamespace(
            config=workload,
            requests=8,
            num_failures=self.failures,
            ttft_ms=slow,
            tpot_ms=fast,
            output_tokens_per_s=200.0,
            requests_per_s=2.0,
            warnings=(),
            goodput=None,
            intervals={},
            bound=None,
            runs=1,
        )


@pytest.fixture
def runner(tmp_path, make_manifest):
    def build(overrides):
        path = tmp_path / f"{len(overrides)}{overrides[0][-1]}.plan"
        write_plan(path, make_manifest(), [PlanTensor.from_bytes("weights/x", overrides[0].encode())])
        return path

    recipe = Recipe.model_validate({"name": "r", "model": "m", "quality": {"max_kl": 0.1}})
    return TrialRunner(
        space=SPACE,
        workload=Workload(prompt_tokens=8, output_tokens=4),
        check=lambda _overrides: recipe,
        build=build,
        open_engine=lambda _path, _switches: SimpleNamespace(close=lambda: None),
        quality=lambda _subject: EvalResult(10.0, 9.0, 0.05, 0.9, 100),
        store=MeasurementStore(tmp_path / "measurements"),
        machine=MACHINE,
        bench=Bench(),
    )


def test_a_point_that_keeps_the_gates_is_measured(runner):
    trial = runner({"bits": 4, "serve.max_seqs": 1})
    assert (trial.state, trial.objective, trial.kl, trial.violation) == ("measured", 5.0, 0.05, 0.0)


@pytest.mark.parametrize(
    ("objective", "value"),
    # 0.36 an hour are 0.0001 a second; 200 tokens/s: 0.5 millionths a token.
    [("ttft_p50_ms", 50.0), ("tpot_p50_ms", 5.0), ("tokens_per_s", 200.0), ("cost", 0.5)],
)
def test_objectives_by_hand(runner, objective, value):
    priced = replace(runner, space=Space(SPACE.choices, objective), price_per_hour=0.36)
    assert priced({"bits": 4}).objective == pytest.approx(value)


def test_a_failed_gate_gets_no_load(runner):
    rough = replace(runner, quality=lambda _subject: EvalResult(10.0, 9.0, 0.3, 0.9, 100))
    trial = rough({"bits": 4})
    assert (trial.state, trial.objective, runner.bench.runs) == ("gate", None, 0)
    assert trial.reason == "max_kl 0.1: measured 0.3"
    assert trial.violation == pytest.approx(2.0), "0.3 is three times 0.1"


def test_equal_plans_under_equal_switches_are_measured_once(runner):
    runner({"bits": 4, "serve.max_seqs": 1})
    runner({"bits": 4, "serve.max_seqs": 1})
    assert runner.bench.runs == 1
    runner({"bits": 4, "serve.max_seqs": 2})
    assert runner.bench.runs == 2
    replace(runner, fresh=True)({"bits": 4, "serve.max_seqs": 1})
    assert runner.bench.runs == 3


def test_failed_requests_are_no_figure_and_are_not_kept(runner):
    failing = replace(runner, bench=Bench(failures=2))
    assert failing({"bits": 4}).reason == "2 of 8 requests failed"
    assert runner({"bits": 4}).state == "measured"


def test_a_recipe_that_cannot_be_is_not_built(runner):
    def check(_overrides):
        raise ConfigError("r", [Fault("passes[0].rtn.bits", "must be 2, 3, 4 or 8")])

    def build(_overrides):
        raise AssertionError("not built")

    trial = replace(runner, check=check, build=build)({"bits": 5})
    assert (trial.state, trial.reason) == ("refused", "passes[0].rtn.bits: must be 2, 3, 4 or 8")


def test_a_build_that_fails_is_a_trial_with_its_reason(runner):
    def build(_overrides):
        raise LoweringError("no kernel\nfor it")

    trial = replace(runner, build=build)({"bits": 4})
    assert (trial.state, trial.reason) == ("failed", "no kernel")


def test_a_build_that_finds_faults_tells_them(runner):
    def build(_overrides):
        raise ConfigError("recipe", [Fault("passes[0].rtn", "3 bits have no kernel")])

    assert replace(runner, build=build)({"bits": 3}).reason == "passes[0].rtn: 3 bits have no kernel"


def test_a_full_disk_is_no_fault_of_the_point(runner):
    def build(_overrides):
        raise StorageError("no room")

    with pytest.raises(StorageError):
        replace(runner, build=build)({"bits": 4})


def test_a_knee_is_the_rate_that_held(runner):
    climbed = []

    def ladder(_engine, workload, attain):
        climbed.append(attain)
        return {"knee": {"rate_per_s": 3.5, "fails_at_per_s": 3.8}}

    knee = replace(runner, space=Space(SPACE.choices, "knee"), ladder=ladder)
    assert knee({"bits": 4}).objective == 3.5
    assert knee({"bits": 4}).objective == 3.5
    assert climbed == [0.95]


def test_violation_is_that_of_the_worst_gate():
    measured = EvalResult(12.0, 10.0, 0.2, 0.6, 100)
    assert violation(QualitySpec(max_kl=0.2, min_top1=0.5), measured) == 0
    # KL at its limit; top-1 0.6 of 0.8 misses by a quarter; perplexity 1.2 of 1.1.
    gates = QualitySpec(max_kl=0.2, min_top1=0.8, max_perplexity_ratio=1.1)
    assert violation(gates, measured) == pytest.approx(0.25)
    assert violation(gates, EvalResult(12.0, None, None, None, 100)) == 1.0
    assert violation(QualitySpec(max_kl=0.2), EvalResult(12.0, 10.0, math.nan, 0.6, 100)) == 1.0
