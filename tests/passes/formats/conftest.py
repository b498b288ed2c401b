"""A tiny Llama whose linear layers can be replaced by packed ones, in any format, by an independent packer."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from optimc_passes.load import load_checkpoint


def _beside(name: str) -> Any:
    """Import a module that lies beside the tests, which are no package."""
    spec = importlib.util.spec_from_file_location(f"formats_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


UNPACK = _beside("unpack")


@pytest.fixture(scope="session")
def unpack() -> Any:
    return UNPACK


class Layer:
    """Random numbers of a quantized layer [N, C] and the weight they stand for."""

    def __init__(self, outputs: int, columns: int, bits: int, group: int, *, symmetric: bool, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        groups = -(-columns // group)
        self.bits, self.group = bits, group
        self.codes = generator.integers(0, 2**bits, (outputs, columns))
        self.scales = (0.02 + 0.05 * generator.random((outputs, groups))).astype(np.float16).astype(np.float32)
        half = 2 ** (bits - 1)
        self.zeros = (
            np.full((outputs, groups), half) if symmetric else generator.integers(1, 2**bits, (outputs, groups))
        )
        self.g_idx = np.arange(columns) // group

    def shuffle(self, seed: int) -> Layer:
        """Put columns into groups by chance, as act-order does."""
        self.g_idx = np.random.default_rng(seed).permutation(self.g_idx)
        return self

    @property
    def weight(self) -> np.ndarray:
        groups = self.g_idx
        return ((self.codes - self.zeros[:, groups]) * self.scales[:, groups]).astype(np.float32)


class Folder:
    """A checkpoint folder being made."""

    def __init__(self, path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        self.path, self.tensors, self.config = path, tensors, config

    def put(self, layer: str, parts: dict[str, np.ndarray], *, keep: bool = False) -> None:
        """Replace a layer's weight by packed parts."""
        if not keep:
            self.tensors.pop(f"{layer}.weight", None)
        self.tensors.update({f"{layer}.{part}": np.ascontiguousarray(array) for part, array in parts.items()})

    def write(self) -> Path:
        # safetensors writes a buffer as it lies in memory.
        arrays = {name: np.ascontiguousarray(array) for name, array in self.tensors.items()}
        save_file(arrays, self.path / "model.safetensors", metadata={"format": "pt"})
        (self.path / "config.json").write_text(json.dumps(self.config))
        return self.path

    def load(self) -> Any:
        return load_checkpoint(self.write(), cache_dir=self.path / "cache")

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Shapes of the decoder's linear layers by module name."""
        return {
            name.removesuffix(".weight"): array.shape
            for name, array in self.tensors.items()
            if name.endswith("_proj.weight")
        }


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random Llama of the given changes; each once."""
    made: dict[str, Path] = {}

    def make(**changes: Any) -> Path:
        key = json.dumps(changes, sort_keys=True)
        if key not in made:
            facts: dict[str, Any] = {
                "vocab_size": 96,
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
                "tie_word_embeddings": False,
                "bos_token_id": 0,
                "eos_token_id": 1,
            }
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**(facts | changes))).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter, std=0.3)
            made[key] = tmp_path_factory.mktemp("origin")
            model.save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture
def make_folder(origin: Callable[..., Path], tmp_path: Path) -> Callable[..., Folder]:
    def make(**changes: Any) -> Folder:
        source = origin(**changes)
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        config = json.loads((source / "config.json").read_text())
        return Folder(path, dict(load_file(source / "model.safetensors")), config)

    return make


@pytest.fixture
def folder(make_folder: Callable[..., Folder]) -> Folder:
    return make_folder()


@pytest.fixture(scope="session")
def layer() -> type[Layer]:
    return Layer
