"""The real model the whole way: SmolLM2-135M-Instruct from its GGUF to a measured plan and an answered question."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimc.build import BuildOptions, build_recipe
from optimc.plan import Plan
from optimc_passes.calibrate import evaluation_windows
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def build_model(smollm2, cache_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")

    def build(name):
        options = BuildOptions(output=folder / f"{name}.plan", cache_dir=cache_dir)
        return build_recipe(Path(f"recipes/{name}.yaml"), options).path

    return build


@pytest.fixture(scope="module")
def fp32(build_model):
    return build_model("smollm2-fp32")


def evaluate(cli, plan, *arguments):
    result = cli("eval", plan, "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_fp32_equals_transformers_on_served_text(cli, fp32):
    figures = evaluate(cli, fp32, "--windows", 3)
    assert set(figures) == {
        "perplexity", "reference_perplexity", "kl_mean", "kl_windows", "top1_agreement", "tokens"
    }  # fmt: skip
    assert figures["tokens"] == 3 * 511
    assert sum(figures["kl_windows"]) / 3 == pytest.approx(figures["kl_mean"], abs=1e-9)
    assert figures["perplexity"] == pytest.approx(figures["reference_perplexity"], rel=1e-3)
    assert figures["kl_mean"] < 1e-5
    assert figures["top1_agreement"] > 0.999


@pytest.mark.slow
def test_fp32_has_the_perplexity_transformers_has(cli, fp32):
    figures = evaluate(cli, fp32)
    assert figures["tokens"] == 16 * 511
    # 15.09 with the topics of Python 3.11; they differ a little from version to version.
    assert figures["reference_perplexity"] == pytest.approx(15.09, rel=0.02)
    assert figures["perplexity"] == pytest.approx(figures["reference_perplexity"], rel=1e-3)


def test_4454_exported_nodes_become_281(fp32):
    """Nine for each of 30 layers, and eleven around them: 121 are products, 30 are attentions."""
    with Plan.open(fp32) as plan:
        graph = plan.manifest.graph
    assert (graph.exported_nodes, graph.attached_nodes, graph.fused_nodes) == (4454, 642, 281)


def test_fp32_knows_the_capital_of_france(fp32):
    with Plan.open(fp32) as plan:
        template = ChatTemplate.from_plan(plan)
    with Engine.load(fp32) as engine:
        prompt = template.encode(engine.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
        answer = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=32))[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_the_bench_measures_what_it_says(cli, fp32):
    shape = ["--prompt-tokens", 64, "--output-tokens", 8, "--requests", 3, "--no-bound"]
    result = cli("bench", fp32, *shape, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["requests"], figures["failures"]) == (3, 0)
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert figures[name]["n"] == 3
        assert figures[name]["p50"] > 0
    assert figures["output_tokens_per_s"] > 0
    assert figures["prefill_tokens_per_s"] > 0
    assert figures["prefix_hit_rate"] == 0


@pytest.mark.slow
def test_64_requests_together_get_what_each_gets_alone(fp32):
    with Plan.open(fp32) as plan:
        text = evaluation_windows(plan.blob("tokenizer/tokenizer.json"), windows=4).ravel()
    rng = np.random.default_rng(5)
    starts, lengths = rng.integers(0, len(text) - 200, 64), rng.integers(1, 200, 64)
    prompts = [text[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)]
    params = [SamplingParams(temperature=0.0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(8, 17, 64)]
    with Engine.load(fp32, EngineConfig(prefix_cache=False)) as engine:
        alone = [engine.generate([prompt], each)[0].text for prompt, each in zip(prompts, params, strict=True)]
    block_bytes = 16 * 11520 * 4
    for config, preempts in ((EngineConfig(), False), (EngineConfig(kv_memory_bytes=30 * block_bytes), True)):
        with Engine.load(fp32, config) as engine:
            together = [generation.text for generation in engine.generate(prompts, params)]
            stats = engine.stats()
            engine.scheduler.check_integrity()
        assert together == alone
        assert (stats.preemptions > 0) == preempts
        assert stats.blocks_used == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.mark.slow
@pytest.mark.parametrize(("name", "max_kl", "max_bytes"), [("smollm2-int8", 0.01, 290e6), ("smollm2-int4", 0.6, 190e6)])
def test_quantized_plans_are_small_and_close(cli, build_model, name, max_kl, max_bytes):
    plan = build_model(name)
    assert plan.stat().st_size < max_bytes
    figures = evaluate(cli, plan, "--windows", 4)
    assert 0 < figures["kl_mean"] < max_kl
