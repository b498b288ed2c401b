"""A tiny Llama with a tokenizer and a chat template, recipes for it, and plans built from them once per session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.build import BuildOptions, build_recipe

SPECIALS = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MODEL = Path("models/smollm2-135m-instruct.gguf")


@pytest.fixture(scope="session")
def tiny_model() -> LlamaForCausalLM:
    """Three layers; the head's weights are large, so that the likeliest token leads by a clear margin."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, (8.0 if name == "lm_head.weight" else 1.5) / parameter.shape[1] ** 0.5)
    return model


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["what is the capital of the country and who wrote the book about it"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture(scope="session")
def make_recipe(tiny_folder: Path) -> Callable[..., Path]:
    """Write a recipe for the tiny model; keywords replace its keys."""

    def make(path: Path, **changes: Any) -> Path:
        facts = {
            "name": path.stem,
            "model": str(tiny_folder),
            "passes": ["fuse"],
            "limits": {"max_seq_len": 256, "max_step_tokens": 64, "max_seqs": 16, "kv_memory": "4MiB"},
        }
        path.write_text(yaml.safe_dump(facts | changes, sort_keys=False))
        return path

    return make


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def build(make_recipe: Callable[..., Path], cache_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    """Build a recipe of the given keys; all builds of a session share one cache."""
    folder = tmp_path_factory.mktemp("plans")

    def build(name: str, **changes: Any):
        recipe = make_recipe(folder / f"{name}.yaml", **changes)
        return build_recipe(recipe, BuildOptions(output=folder / f"{name}.plan", cache_dir=cache_dir))

    return build


@pytest.fixture(scope="session")
def fp32_plan(build) -> Path:
    return build("fp32").path


@pytest.fixture(scope="session")
def int4_plan(build) -> Path:
    rtn = {"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}
    # Exact activations: what is compared with transformers is the rounding of the weights alone.
    target = {"int8_activations": False}
    return build("int4", passes=[rtn, "fuse"], target=target).path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    if not MODEL.exists():
        pytest.fail(f"{MODEL} is missing; `make model` fetches it")
    return MODEL


@pytest.fixture(scope="session")
def cli(cache_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line as a user does."""

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "optimc", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OPTIMC_CACHE": str(cache_dir), **(env or {})},
            check=False,
        )

    return run
