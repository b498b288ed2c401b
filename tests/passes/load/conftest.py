"""Tiny random checkpoints, made once per session and copied for tests that change them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from optimc_passes.checkpoint import Checkpoint
from optimc_passes.load import load_checkpoint

SPECIALS = ["<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"]


def tiny_config(**changes: Any) -> LlamaConfig:
    facts = {
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaConfig(**(facts | changes))


def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the other dog"] * 9, trainer)
    return tokenizer


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes a key."""
    facts = json.loads(path.read_text()) if path.exists() else {}
    facts |= changes
    path.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))


def write_tokenizer(folder: Path) -> None:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<|bos|>",
        eos_token={"__type": "AddedToken", "content": "<|eos|>", "lstrip": False, "special": True},
        pad_token="<|pad|>",
        chat_template="{{ messages[0]['content'] }}",
    )


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return make_model(tiny_config())


@pytest.fixture(scope="session")
def single_origin(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def sharded_origin(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    model.save_pretrained(folder, max_shard_size="270KB")
    write_tokenizer(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    return folder


@pytest.fixture
def folder(single_origin: Path, tmp_path: Path) -> Path:
    """A checkpoint in one file, the test's own copy."""
    return Path(shutil.copytree(single_origin, tmp_path / "model"))


@pytest.fixture
def sharded(sharded_origin: Path, tmp_path: Path) -> Path:
    """The same checkpoint in three shards with an index, the test's own copy."""
    return Path(shutil.copytree(sharded_origin, tmp_path / "sharded"))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Checkpoint]:
    """`load_checkpoint` with a cache of its own."""
    return lambda model, **options: load_checkpoint(model, cache_dir=tmp_path / "cache", **options)


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions of this file, for tests that make checkpoints of their own."""

    class Tools:
        config = staticmethod(tiny_config)
        model = staticmethod(make_model)
        tokenizer = staticmethod(make_tokenizer)
        edit_json = staticmethod(edit_json)
        write_tokenizer = staticmethod(write_tokenizer)

    return Tools
