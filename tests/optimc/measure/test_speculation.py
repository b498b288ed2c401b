"""What the comparison says, by hand; and the whole way on an engine that really guesses."""

import json

import numpy as np
import pytest
from rich.console import Console

from optimc.errors import OverloadedError
from optimc.measure.load.dataset import LinesDataset
from optimc.measure.speculation import RANDOM_PROMPTS, bench_speculation, break_even_batch, summarize_speculation
from optimc.measure.workload import Workload
from optimc.plan import Limits
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import KvPoolInfo, StepResult
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.stats import ProposerStats, SpeculationStats

COST = CostModel([(1, 2e-3), (4, 2.4e-3), (8, 4.8e-3), (16, 9.6e-3)])


def stats(**changes):
    figures = {
        "mode": "ngram",
        "is_active": True,
        "proposers": {"ngram": ProposerStats(drafted=300, accepted=150, trees=100)},
        "position_drafted": (100, 80, 60),
        "position_accepted": (80, 50, 20),
        "sequence_steps": 100,
        "emitted": 250,
        "draft_s": 0.01,
    }
    return SpeculationStats(**{**figures, **changes})


def test_what_is_predicted_is_tokens_over_costs():
    result = summarize_speculation(stats(), COST, batch=1, plain_tokens_per_s=500.0, speculative_tokens_per_s=1000.0)
    assert result.acceptance_by_position == pytest.approx((0.8, 0.625, 1 / 3))
    assert result.tokens_per_step == 2.5
    assert result.draft_s_per_step == pytest.approx(1e-4)
    # three guesses a step make four rows
    assert result.predicted_speedup == pytest.approx(2.5 / ((2.4e-3 + 1e-4) / 2e-3))
    assert result.observed_speedup == 2


def test_steps_of_a_batch_are_shared():
    result = summarize_speculation(stats(), COST, batch=4, plain_tokens_per_s=1.0, speculative_tokens_per_s=1.0)
    assert dict(result.costs)[16] == pytest.approx(9.6e-3)
    assert result.draft_s_per_step == pytest.approx(4e-4)  # 25 steps
    assert result.predicted_speedup == pytest.approx(2.5 / ((9.6e-3 + 4e-4) / 2.4e-3))


def test_the_batch_from_which_guesses_do_not_pay():
    # Up to four rows nearly free, then each costs as much as a step's share of a sequence: 0.6 ms.
    assert break_even_batch([0.5], COST, 0.0) == 4
    assert break_even_batch([0.0], COST, 0.0) == 1
    assert break_even_batch([], COST, 0.0) == 1
    assert break_even_batch([0.9], CostModel([(1, 1e-3), (2, 1e-3)]), 0.0) is None
    assert break_even_batch([0.5], COST, 5e-3) == 1


def test_the_json_has_the_promised_keys():
    result = summarize_speculation(stats(), COST, batch=1, plain_tokens_per_s=1.0, speculative_tokens_per_s=1.0)
    data = json.loads(json.dumps(result.to_json()))
    assert set(data) == {
        "mode", "proposers", "acceptance_by_position", "tokens_per_step", "draft_ms_per_step", "costs_ms",
        "predicted_speedup", "observed_speedup", "break_even_batch", "plain_tokens_per_s", "speculative_tokens_per_s",
    }  # fmt: skip
    assert data["proposers"] == {"ngram": {"drafted": 300, "accepted": 150, "trees": 100, "acceptance": 0.5}}
    assert data["costs_ms"]["4"] == pytest.approx(2.4)


class Counting:
    """The next token is the last one plus one, modulo seven; rows are free."""

    heads = None
    pool = KvPoolInfo(num_blocks=512, block_size=16, bytes_per_block=1)

    def execute(self, plan):
        logits = np.zeros((len(plan.logits_rows), 384), np.float32)
        logits[np.arange(len(logits)), (plan.tokens[plan.logits_rows] + 1) % 7 + 10] = 9
        return StepResult(logits)

    def move(self, src_slots, dst_slots):
        pass

    def close(self):
        pass


@pytest.fixture
def engine(make_manifest):
    manifest = make_manifest()
    manifest = manifest.model_copy(
        update={"limits": Limits(max_seq_len=2048, max_step_tokens=64, max_seqs=8, kv_memory_bytes=1)}
    )
    with Engine(
        Counting(), manifest, None, EngineConfig(speculation=SpeculationOptions("ngram", always=True))
    ) as engine:
        yield engine


def test_an_engine_is_measured_with_and_without_in_turns(engine):
    config = Workload(prompt_tokens=4, output_tokens=60, requests=2, warmup_requests=1, prompts="some.jsonl")
    result = bench_speculation(engine, config, prompts=[[1, 2, 3], [5, 6]])
    figures = result.speculation
    assert figures.mode == "ngram"
    assert figures.proposers["ngram"].accepted > 0
    assert figures.tokens_per_step > 2
    assert figures.plain_tokens_per_s > 0
    assert engine.stats().finished["length"] == 4 * 3
    assert not any("asked for" in warning for warning in result.warnings)
    data = result.to_json()
    assert data["speculation"]["mode"] == "ngram"
    assert data["config"]["prompts"] == "some.jsonl"
    console = Console(width=200)
    with console.capture() as capture:
        console.print(result.table())
    assert "speculation ngram" in capture.get()
    assert "prompts of some.jsonl" in capture.get()


def test_the_dataset_is_what_is_sent_and_brings_no_warning(engine):
    sent, submit = [], engine.submit

    def noting(prompt, params, **options):
        sent.append(tuple(prompt))
        return submit(prompt, params, **options)

    engine.submit = noting
    dataset = LinesDataset([([1, 2, 3], 8, None), ([5, 6], 8, None)], is_scheduled=False)
    config = Workload(output_tokens=8, requests=2, warmup_requests=1, dataset="file", prompts="some.jsonl")
    result = bench_speculation(engine, config, dataset=dataset)
    assert set(sent) == {(1, 2, 3), (5, 6)}
    assert RANDOM_PROMPTS not in result.warnings


def test_failures_without_guesses_are_not_hidden_behind_successes_with(engine):
    submit = engine.submit

    def refusing(prompt, params, **options):
        if params.speculation == "off" and params.seed == 2:
            raise OverloadedError("no")
        return submit(prompt, params, **options)

    engine.submit = refusing
    config = Workload(prompt_tokens=4, output_tokens=8, requests=3, warmup_requests=1)
    result = bench_speculation(engine, config)
    assert not result.ok
    assert result.failures == {"OverloadedError: no": 1}


def test_random_prompts_come_with_a_warning(engine):
    config = Workload(prompt_tokens=4, output_tokens=8, requests=1, warmup_requests=0)
    assert RANDOM_PROMPTS in bench_speculation(engine, config).warnings
