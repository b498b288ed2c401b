"""Guessing that does not pay costs nothing: steps with a speculator that sleeps take what steps without one take."""

import statistics
import time

import pytest

from optimc_runtime.config import EngineConfig, SpeculationOptions

STEPS = 200
ROUNDS = 15
STEP_S = 2e-4
"""What a step of the executor takes: less than of any model worth serving."""


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
def test_a_sleeping_speculator_costs_less_than_five_percent(make_engine, drive, batch):
    limits = {"max_seq_len": 4000, "max_step_tokens": 64, "num_blocks": 9000, "poison": False}

    def make(mode):
        engine = make_engine(EngineConfig(speculation=SpeculationOptions(mode)), **limits)
        for order in range(batch):
            drive.submit(engine, [order, 1], drive.greedy(3900))
        engine.step()
        if mode == "ngram":
            [asked] = engine._speculator._asked
            asked.attention.wakes_at = 10**9
            engine._speculator._rest()
            assert engine._speculator.is_idle
        logits = engine.executor.execute(_last_plan(engine)).logits.copy()
        result = type("Result", (), {"logits": logits, "hidden": None})

        def execute(plan):
            until_s = time.thread_time() + STEP_S
            while time.thread_time() < until_s:
                pass
            return result

        engine.executor.execute = execute
        return engine

    def _last_plan(engine):
        return engine.scheduler.schedule().plan

    def step_s(engine):
        started_s = time.thread_time()
        for _ in range(STEPS):
            engine.step()
        return time.thread_time() - started_s

    engines = make("off"), make("ngram")
    times = [[], []]
    for _ in range(ROUNDS):
        for mine, engine in zip(times, engines, strict=True):
            mine.append(step_s(engine))
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    assert engines[1].stats().speculation.proposers["ngram"].trees == 0
    assert ratio < 1.05
