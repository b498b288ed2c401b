"""On real plans, guesses change no token: on the cpu target not a bit of a logprob either, nor of what the pool holds.

The scripted runs of tests/runtime/test_speculation.py vary what is scheduled; these vary what computes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

VOCAB = 384
INT4 = {"rtn": {"bits": 4, "group_size": 32, "symmetric": True}}
PLANS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int4": {"passes": [INT4, "fuse"]},
    "int8 pool": {"kv_dtype": "int8"},
    "int4 pool": {"kv_dtype": "int4"},
    "windows": {"model": "windowed"},
}


@pytest.fixture(scope="module")
def windowed(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that see 24 tokens back: accepted paths cross the window's edge."""
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=24,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, (8.0 if name == "lm_head.weight" else 1.5) / parameter.shape[1] ** 0.5)
    folder = tmp_path_factory.mktemp("windowed")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def plan_of(build: Callable, windowed: Path) -> Callable[[str, str], Path]:
    def plan_of(backend: str, kind: str) -> Path:
        changes = dict(PLANS[kind])
        target = {"backend": backend}
        if "kv_dtype" in changes:
            target["kv_dtype"] = changes.pop("kv_dtype")
        if "model" in changes:
            changes["model"] = str(windowed)
        return build(f"speculation-{backend}-{kind.replace(' ', '')}", target=target, **changes).path

    return plan_of


class Run:
    """One engine's answers to a few prompts, step by step."""

    def __init__(self, plan: Path, prompts: list[list[int]], params: list[SamplingParams], speculator=None) -> None:
        self.outputs: dict[str, list] = {f"r{index}": [] for index in range(len(prompts))}
        self.engine = Engine.load(plan, EngineConfig(threads=1))
        self.engine._loop._speculator = speculator
        for (name, outputs), prompt, each in zip(self.outputs.items(), prompts, params, strict=True):
            self.engine.submit(prompt, each, on_output=outputs.append, request_id=name)

    def steps(self):
        """Take all steps; yield after each."""
        more = True
        while more:
            more = self.engine.step()
            self.engine.scheduler.check_integrity()
            yield
        self.engine.close()

    def finish(self) -> Run:
        for _ in self.steps():
            pass
        return self

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: [t for out in outputs for t in out.token_ids] for name, outputs in self.outputs.items()}

    @property
    def logprobs(self) -> dict[str, list[float]]:
        return {name: [p.logprob for out in outputs for p in out.logprobs] for name, outputs in self.outputs.items()}


def workload(batch: int, length: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Every other request samples."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 380, int(rng.integers(1, 40))).tolist() for _ in range(batch)]
    sampled = {"temperature": 0.8, "top_p": 0.9}
    return prompts, [
        SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            logprobs=0,
            seed=index,
            **(sampled if index % 2 else {"temperature": 0.0}),
        )
        for index in range(batch)
    ]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "windows" else kind for kind in PLANS]
)
def test_on_cpu_guesses_change_no_bit(plan_of, speculation, kind):
    plan = plan_of("cpu", kind)
    prompts, params = workload(3, 40)
    plain = Run(plan, prompts, params).finish()
    for source, shape in (("oracle", "2x2"), ("mixed", "26 nodes"), ("mixed", "chain of 4")):
        speculator = speculation.make(source, shape, plain.tokens, VOCAB)
        guessed = Run(plan, prompts, params, speculator).finish()
        assert guessed.tokens == plain.tokens, (source, shape)
        assert guessed.logprobs == plain.logprobs, (source, shape)
        assert sum(len(each.path) for each in speculator.verified) > 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_on_cpu_guesses_change_no_bit_of_long_texts(plan_of, speculation, kind, batch):
    plan = plan_of("cpu", kind)
    prompts, params = workload(batch, 200)
    plain = Run(plan, prompts, params).finish()
    for source in speculation.rights:
        for shape in speculation.shapes:
            speculator = speculation.make(source, shape, plain.tokens, VOCAB)
            guessed = Run(plan, prompts, params, speculator).finish()
            assert guessed.tokens == plain.tokens, (source, shape)
            assert guessed.logprobs == plain.logprobs, (source, shape)


@pytest.mark.parametrize("kind", ["float32", pytest.param("windows", marks=pytest.mark.slow)])
def test_on_onnxruntime_guesses_change_no_token(plan_of, speculation, kind):
    """Products of other shapes round differently; the tiny model's choices lead by margins far wider than that."""
    plan = plan_of("onnxruntime", kind)
    prompts, params = workload(3, 30)
    plain = Run(plan, prompts, params).finish()
    for source, shape in (("oracle", "2x2"), ("mixed", "chain of 4")):
        speculator = speculation.make(source, shape, plain.tokens, VOCAB)
        guessed = Run(plan, prompts, params, speculator).finish()
        assert guessed.tokens == plain.tokens, (source, shape)
        for name, expected in plain.logprobs.items():
            np.testing.assert_allclose(guessed.logprobs[name], expected, rtol=0, atol=1e-3)


def held(engine: Engine) -> dict[str, list[bytes]]:
    """What the pool holds of every running sequence's computed tokens, in their order."""
    size = engine.limits.block_size
    slot_bytes = engine._executor._program.slot_bytes
    return {
        sequence.request_id: [
            slot_bytes(sequence.blocks[place // size] * size + place % size) for place in range(sequence.num_computed)
        ]
        for sequence in engine.scheduler.running
    }


@pytest.mark.parametrize("kind", ["float32", "int8 pool", "int4 pool"])
def test_after_every_step_the_pool_holds_what_plain_decoding_wrote(plan_of, speculation, kind):
    plan = plan_of("cpu", kind)
    prompts, params = workload(3, 24)
    plain = Run(plan, prompts, params)
    written: dict[str, list[bytes]] = {}
    for _ in plain.steps():
        written |= held(plain.engine) if plain.engine.scheduler.running else {}
    for source, shape in (("mixed", "2x2"), ("oracle", "26 nodes")):
        guessed = Run(plan, prompts, params, speculation.make(source, shape, plain.tokens, VOCAB))
        compared = 0
        for _ in guessed.steps():
            for name, tokens in held(guessed.engine).items() if guessed.engine.scheduler.running else ():
                count = min(len(tokens), len(written[name]))  # the last steps of a plain run write no more
                assert tokens[:count] == written[name][:count], (source, shape)
                compared += count
        assert guessed.tokens == plain.tokens
        assert compared > 300
