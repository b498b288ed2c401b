"""The whole engine on the fake GPU: scheduler, sampler, guesses and a pool that is too small for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimc.plan import Plan
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.executor.load import load_executor
from optimc_runtime.request import SamplingParams

PROMPTS = [np.random.default_rng(seed).integers(1, 50, 3 + 4 * seed).tolist() for seed in range(9)]


def answers(plan: Plan, config: EngineConfig, kv_memory_bytes: int) -> tuple[list[tuple[int, ...]], Any]:
    executor = load_executor(plan, kv_memory_bytes=kv_memory_bytes)
    with Engine(executor, plan.manifest, None, config) as engine:
        generations = engine.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
        return [generation.token_ids for generation in generations], engine.stats()


@pytest.fixture(scope="module")
def expected(tiny_decoder: Any, make_plan: Callable[..., Plan]) -> list[tuple[int, ...]]:
    return answers(make_plan(tiny_decoder()), EngineConfig(), 1 << 20)[0]


@pytest.fixture(scope="module")
def plan(tiny_decoder: Any, tensorrt_plan: Callable[..., Plan]) -> Plan:
    return tensorrt_plan(tiny_decoder())


def test_text_is_that_of_onnxruntime(plan: Plan, machine: Any, expected: list[tuple[int, ...]]) -> None:
    assert answers(plan, EngineConfig(), 1 << 20)[0] == expected


def test_preempted_requests_are_read_again(plan: Plan, machine: Any, expected: list[tuple[int, ...]]) -> None:
    found, stats = answers(plan, EngineConfig(prefix_cache=False), 512 * 30)
    assert found == expected
    assert stats.preemptions > 0


def test_guesses_change_no_text(plan: Plan, machine: Any, expected: list[tuple[int, ...]]) -> None:
    config = EngineConfig(speculation=SpeculationOptions("ngram", always=True))
    found, stats = answers(plan, config, 1 << 20)
    assert found == expected
    assert stats.speculation.proposers["ngram"].drafted > 0
