"""Many requests at once, on a real plan: each answer is what the request gets alone, and no block is lost."""

import numpy as np
import pytest

from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

NUM_REQUESTS = 64


@pytest.fixture(scope="module")
def workload():
    """Prompts of 1 to 150 tokens, some beginning alike, with outputs of 1 to 40 tokens."""
    rng = np.random.default_rng(11)
    shared = rng.integers(2, 380, 60).tolist()
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        own = rng.integers(2, 380, int(rng.integers(1, 90))).tolist()
        prompts.append(shared + own if index % 3 == 0 else own)
        seeded = {"temperature": 0.8, "seed": index, "top_p": 0.9} if index % 4 == 0 else {"temperature": 0.0}
        params.append(SamplingParams(max_tokens=int(rng.integers(1, 41)), ignore_eos=index % 2 == 0, **seeded))
    return prompts, params


@pytest.fixture(scope="module")
def alone(fp32_plan, workload):
    """The tokens of each request when it has the engine to itself, without prefix cache."""
    with Engine.load(fp32_plan, EngineConfig(prefix_cache=False)) as engine:
        return [engine.generate([prompt], params)[0].token_ids for prompt, params in zip(*workload, strict=True)]


SWITCHES = {
    "all on": EngineConfig(),
    "no prefix cache": EngineConfig(prefix_cache=False),
    "whole prompts": EngineConfig(chunked_prefill=False),
    "static batches": EngineConfig(inflight_batching=False),
    "tiny steps": EngineConfig(max_step_tokens=7, max_seqs=5),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_together_they_get_what_each_gets_alone(fp32_plan, workload, alone, name):
    prompts, params = workload
    config = SWITCHES[name]
    if not config.chunked_prefill:
        keep = [index for index, prompt in enumerate(prompts) if len(prompt) <= 64]
        prompts, params = [prompts[i] for i in keep], [params[i] for i in keep]
        alone = [alone[i] for i in keep]
    with Engine.load(fp32_plan, config) as engine:
        together = [generation.token_ids for generation in engine.generate(prompts, params)]
        check_pool(engine)
    assert together == alone


def test_a_pool_so_small_that_requests_are_preempted_changes_nothing(fp32_plan, workload, alone):
    # 20 blocks of 16 tokens, 12,288 bytes each: little more than the longest request.
    with Engine.load(fp32_plan, EngineConfig(kv_memory_bytes=20 * 12288)) as engine:
        together = [generation.token_ids for generation in engine.generate(*workload)]
        stats = engine.stats()
        check_pool(engine)
    assert stats.preemptions > 0
    assert together == alone


def check_pool(engine):
    """Free and cached blocks make up the pool, nothing refers to any, nobody waits."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    engine.scheduler.pool.check_integrity()
