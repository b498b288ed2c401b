"""Heads from a recipe to served text: trained on a tiny model's own text, they guess it and change none of it.

The next token of the other tests' tiny model follows from all tokens before it, as if by a hash, so nothing can be
learned about the one after. Here layers are weaker beside the embedding: what comes follows mostly from the last token.
"""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimc.plan import Plan
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

WORDS = ["what", "is", "the", "capital", "of", "the", "country", "and", "who", "wrote", "the", "book", "about", "it"]
HEADS: dict[str, Any] = {
    "heads": 2,
    "draft_vocab": "all",
    "epochs": 6.0,
    "batch_tokens": 256,
    "bits": 8,
    "data": {"chat_tokens": 0, "prose_tokens": 8_000, "greedy": 1.0, "max_tokens": 64},
}
PROMPTS = [[5, 9, 30], [200, 3, 7, 7, 12], [40, 41, 42, 43]]


@pytest.fixture(scope="module")
def steady_folder(tiny_model, tiny_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("steady") / "checkpoint"
    shutil.copytree(tiny_folder, folder)
    model = copy.deepcopy(tiny_model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def build_heads(build, steady_folder, tmp_path_factory) -> Callable[..., Any]:
    text = tmp_path_factory.mktemp("text") / "text.txt"
    rng = random.Random(3)
    text.write_text(" ".join(rng.choice(WORDS) for _ in range(20_000)))
    calibration = {"dataset": str(text), "samples": 64, "seq_len": 128}

    def make(name: str, **changes: Any) -> Any:
        passes = ["fuse", {"medusa": HEADS}]
        facts = {"model": str(steady_folder), "calibration": calibration, "report": {"windows": 0}, "passes": passes}
        return build(name, **(facts | changes))

    return make


def answers(plan: Path, mode: str) -> tuple[list[tuple[int, ...]], float]:
    """Return greedy and drawn answers, and the tokens per step of a sequence."""
    config = EngineConfig(threads=1, speculation=SpeculationOptions(mode, always=mode != "off"))
    with Engine.load(plan, config) as engine:
        tokens = []
        for temperature in (0.0, 0.7):
            params = SamplingParams(max_tokens=100, temperature=temperature, seed=4, ignore_eos=True)
            tokens += [generation.token_ids for generation in engine.generate(PROMPTS, params)]
        speculation = engine.stats().speculation
        return tokens, 1.0 if speculation is None else speculation.tokens_per_step


def test_two_hundred_steps_make_a_first_head_that_is_right_more_often_than_not(build_heads):
    result = build_heads("medusa")
    first = next(entry for entry in result.manifest.medusa.accuracies if (entry.head, entry.kind) == (0, "all"))
    assert first.tokens > 100
    assert first.top[0] > 0.5


def test_served_text_is_that_of_plain_decoding_in_fewer_steps(build_heads):
    path = build_heads("medusa").path
    plain, _ = answers(path, "off")
    guessed, tokens_per_step = answers(path, "medusa")
    assert guessed == plain
    assert tokens_per_step > 1.2


def test_a_second_build_takes_the_heads_from_the_cache(build_heads):
    first = build_heads("medusa")
    again = build_heads("medusa_again")
    assert [report.cached for report in again.manifest.passes if report.name == "medusa"] == [True]
    with Plan.open(first.path) as one, Plan.open(again.path) as other:
        names = [spec.name for spec in one if spec.name.startswith("heads/")]
        assert names
        assert all(bytes(one.blob(name)) == bytes(other.blob(name)) for name in names)


@pytest.mark.slow
def test_onnxruntime_serves_heads_too(build_heads):
    path = build_heads("medusa_onnx", target={"backend": "onnxruntime"}).path
    plain, _ = answers(path, "off")
    guessed, tokens_per_step = answers(path, "medusa")
    assert guessed == plain
    assert tokens_per_step > 1.2


@pytest.mark.slow
def test_heads_of_a_quantized_model_serve_it(build_heads):
    rtn = {"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}
    heads = {"medusa": HEADS | {"bits": 4, "tree": "chain:2"}}
    limits = {"max_seq_len": 256, "max_step_tokens": 16, "max_seqs": 16, "kv_memory": "4MiB"}
    result = build_heads("medusa_int4", passes=[rtn, "fuse", heads], limits=limits)
    assert max(rows for rows, _ in result.manifest.medusa.tree.costs) == 16, "no step is larger"
    assert result.manifest.medusa.tree.source == "chain"
    assert result.manifest.medusa.bits == 4
    assert answers(result.path, "medusa")[0] == answers(result.path, "off")[0]
