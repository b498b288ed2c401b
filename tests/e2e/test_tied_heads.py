"""Embedding and head: what the configuration ties, what the checkpoint holds and what was quantized may disagree.

(a) tied, no head tensor (b) the flag says tied, the head differs (c) untied (d) a quantized head (e) tied, and the
recipe quantizes the head (f) the recipe quantizes the embedding. Logits are those of the weights as they are stored,
computed by transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.build import BuildOptions, build_recipe
from optimc.errors import CheckpointError
from optimc_passes.formats.compressed_tensors import pack_layer as pack_compressed
from optimc_passes.formats.gptq import pack_layer as pack_gptq
from optimc_passes.load import load_checkpoint
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.weights import Dense, Quantized
from optimc_runtime.engine import Engine

TOKENS = [3, 17, 42, 99, 5, 310, 77]


@pytest.fixture(scope="module")
def weights(tiny_model) -> dict[str, np.ndarray]:
    """The tiny model's tensors, its head apart from its embedding."""
    return {name: tensor.detach().numpy().copy() for name, tensor in tiny_model.state_dict().items()}


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir()
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def facts(tiny_folder) -> dict[str, Any]:
    return json.loads((tiny_folder / "config.json").read_text())


def expected_logits(tensors: dict[str, np.ndarray], facts: dict[str, Any]) -> np.ndarray:
    """Logits [T, V] of plain weights, by transformers; the head is given apart from the embedding."""
    model = LlamaForCausalLM(LlamaConfig(**{**facts, "tie_word_embeddings": False})).eval()
    model.load_state_dict({name: torch.from_numpy(array.astype(np.float32)) for name, array in tensors.items()})
    with torch.inference_mode():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def engine_logits(folder: Path, tmp_path: Path, cache_dir: Path, **recipe: Any) -> np.ndarray:
    import yaml

    text = {
        "name": "tied",
        "model": str(folder),
        "passes": ["fuse"],
        "target": {"int8_activations": False},
        "limits": {"max_seq_len": 256, "max_step_tokens": 64, "max_seqs": 16, "kv_memory": "4MiB"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(text | recipe))
    plan = build_recipe(path, BuildOptions(output=tmp_path / "tied.plan", cache_dir=cache_dir)).path
    return score(plan)


def score(plan: Path) -> np.ndarray:
    with Engine.load(plan) as engine:
        return engine.score(TOKENS)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() / np.abs(expected).max() < 1e-5


def quantized(weight: np.ndarray, bits: int = 4, group: int = 32) -> Quantized:
    codes, scales, zeros = quantize_affine(weight, bits, group, symmetric=False)
    assert zeros is not None
    # GPTQ's first version has no agreed form for a zero point of 0.
    zeros = np.maximum(zeros, 1)
    return Quantized(Dense.of(codes), Dense.of(scales), Dense.of(zeros), bits, group)


def test_a_tied_without_a_head_tensor(weights, facts, cache_dir, tmp_path):
    tensors = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    stored = {name: array for name, array in tensors.items() if name != "lm_head.weight"}
    folder = write(tmp_path / "model", stored, facts | {"tie_word_embeddings": True})
    assert_close(engine_logits(folder, tmp_path, cache_dir), expected_logits(tensors, facts))


def test_b_a_flag_that_says_tied_over_a_head_of_its_own(weights, facts, cache_dir, tmp_path):
    folder = write(tmp_path / "model", weights, facts | {"tie_word_embeddings": True})
    assert_close(engine_logits(folder, tmp_path, cache_dir), expected_logits(weights, facts))


def test_c_untied(weights, facts, cache_dir, tmp_path):
    folder = write(tmp_path / "model", weights, facts)
    assert_close(engine_logits(folder, tmp_path, cache_dir), expected_logits(weights, facts))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_d_a_quantized_head(weights, facts, cache_dir, tmp_path, method, tied):
    """The packed head is read whatever the flag says, and the embedding beside it stays what it is."""
    stored, plain = dict(weights), dict(weights)
    for name in weights:
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            packed = quantized(weights[name])
            plain[name] = packed.dequantize()
            parts = pack_gptq(packed, "gptq") if method == "gptq" else pack_compressed(packed)
            stored.update({f"{name.removesuffix('weight')}{part}": tensor.read() for part, tensor in parts.items()})
            del stored[name]
    described = {
        "gptq": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False, "lm_head": True},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {
                "all": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 32},
                }
            },
        },
    }[method]
    config = facts | {"tie_word_embeddings": tied, "quantization_config": {"quant_method": method} | described}
    folder = write(tmp_path / "model", stored, config)
    checkpoint = load_checkpoint(folder, cache_dir=tmp_path / "cache")
    assert isinstance(checkpoint.weights["lm_head.weight"], Quantized)
    assert not checkpoint.config.tie_word_embeddings
    embedding = checkpoint.weights["model.embed_tokens.weight"].read()
    assert np.array_equal(embedding, weights["model.embed_tokens.weight"])
    assert_close(engine_logits(folder, tmp_path, cache_dir), expected_logits(plain, facts))


def test_e_tied_and_the_recipe_quantizes_the_head(weights, facts, cache_dir, tmp_path):
    embedding = weights["model.embed_tokens.weight"]
    stored = {name: array for name, array in weights.items() if name != "lm_head.weight"}
    folder = write(tmp_path / "model", stored, facts | {"tie_word_embeddings": True})
    codes, scales, _ = quantize_affine(embedding, 8, 32, symmetric=True)
    head = Quantized(Dense.of(codes), Dense.of(scales), None, 8, 32).dequantize()
    rtn = {"rtn": {"bits": 8, "group_size": 32, "symmetric": True, "only": ["lm_head"], "ignore": []}}
    actual = engine_logits(folder, tmp_path, cache_dir, passes=[rtn, "fuse"])
    assert_close(actual, expected_logits(weights | {"lm_head.weight": head}, facts))
    from optimc.plan import Plan

    with Plan.open(tmp_path / "tied.plan") as plan:
        rows = plan.tensor("weights/model.embed_tokens.weight")
        assert np.array_equal(np.asarray(rows).reshape(embedding.shape), embedding)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_f_the_recipe_quantizes_the_embedding_alone(weights, facts, cache_dir, tmp_path, tied, backend):
    embedding = weights["model.embed_tokens.weight"]
    plain = weights | ({"lm_head.weight": embedding} if tied else {})
    stored = {name: array for name, array in plain.items() if not (tied and name == "lm_head.weight")}
    folder = write(tmp_path / "model", stored, facts | {"tie_word_embeddings": tied})
    codes, scales, zeros = quantize_affine(embedding, 4, 32, symmetric=False)
    rounded = Quantized(Dense.of(codes), Dense.of(scales), Dense.of(zeros), 4, 32).dequantize()
    rtn = {"rtn": {"bits": 4, "group_size": 32, "only": ["embedding"]}}
    target = {"backend": backend, "int8_activations": False}
    actual = engine_logits(folder, tmp_path, cache_dir, passes=[rtn, "fuse"], target=target)
    assert_close(actual, expected_logits(plain | {"model.embed_tokens.weight": rounded}, facts))


def test_a_stray_tensor_and_a_missing_one_fail_by_name(weights, facts, cache_dir, tmp_path):
    stray = write(tmp_path / "stray", weights | {"model.layers.0.mlp.extra.weight": np.ones((2, 2), np.float32)}, facts)
    with pytest.raises(CheckpointError, match=r"no place in the model: model.layers.0.mlp.extra.weight"):
        load_checkpoint(stray, cache_dir=tmp_path / "cache")
    fewer = {name: array for name, array in weights.items() if name != "lm_head.weight"}
    missing = write(tmp_path / "missing", fewer, facts)
    with pytest.raises(CheckpointError, match=r"1 parameter has no tensor: lm_head.weight"):
        load_checkpoint(missing, cache_dir=tmp_path / "cache")
