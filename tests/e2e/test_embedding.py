"""Embedding and head are rounded apart, tied or not: the logits of a plan are those of the weights as rounded.

Activations stay float32 on both targets, so what is left is the rounding of sums.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.build import BuildOptions, build_recipe
from optimc.cli.program_listing import list_program, read_program
from optimc.plan import Plan
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.weights import Dense, Quantized
from optimc_runtime.engine import Engine

BACKENDS = ("cpu", pytest.param("onnxruntime", marks=pytest.mark.slow))

TOKENS = [3, 17, 42, 99, 5, 310, 77, 3]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
COLUMNS = 64
HEAD_ENTRY = {"bits": 8, "group_size": 32, "symmetric": True, "only": ["lm_head"], "ignore": []}


def rounded(weight: np.ndarray, bits: int, group: int, symmetric: bool) -> np.ndarray:
    codes, scales, zeros = quantize_affine(weight, bits, group, symmetric=symmetric)
    zero_points = None if zeros is None else Dense.of(zeros)
    return Quantized(Dense.of(codes), Dense.of(scales), zero_points, bits, group).dequantize()


def embedding_entry(bits: int, group: int, symmetric: bool) -> dict[str, Any]:
    options = {"bits": bits, "group_size": group, "symmetric": symmetric, "ragged": "ragged", "only": ["embedding"]}
    return {"rtn": options}


@pytest.fixture(scope="module")
def models(tiny_model, tiny_folder, tmp_path_factory) -> dict[bool, tuple[Path, dict[str, np.ndarray], dict[str, Any]]]:
    """Folder, tensors and configuration of the tiny model, by whether its head is tied."""
    arrays = {name: tensor.detach().numpy().copy() for name, tensor in tiny_model.state_dict().items()}
    facts = json.loads((tiny_folder / "config.json").read_text())
    tied = tmp_path_factory.mktemp("tied") / "model"
    shutil.copytree(tiny_folder, tied)
    model = LlamaForCausalLM(LlamaConfig(**{**facts, "tie_word_embeddings": True}))
    tied_arrays = {**arrays, HEAD: arrays[EMBEDDING]}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in tied_arrays.items()})
    model.save_pretrained(tied)
    return {False: (tiny_folder, arrays, facts), True: (tied, tied_arrays, facts)}


@pytest.fixture(scope="module")
def plan_of(models, cache_dir, tmp_path_factory) -> Callable[..., Path]:
    """Build a plan of the model with these passes."""

    def build(tied: bool, backend: str, passes: list[Any]) -> Path:
        folder = tmp_path_factory.mktemp("plan")
        recipe = {
            "name": "embedding",
            "model": str(models[tied][0]),
            "passes": [*passes, "fuse"],
            "target": {"backend": backend, "int8_activations": False},
            "limits": {"max_seq_len": 256, "max_step_tokens": 64, "max_seqs": 16, "kv_memory": "4MiB"},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        options = BuildOptions(output=folder / "engine.plan", cache_dir=cache_dir)
        return build_recipe(folder / "recipe.yaml", options).path

    return build


def error(plan: Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> float:
    """Distance of a plan's logits from transformers' with these weights, relative to the largest."""
    model = LlamaForCausalLM(LlamaConfig(**{**facts, "tie_word_embeddings": False})).eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with Engine.load(plan) as engine:
        return float(np.abs(engine.score(TOKENS) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tied", "has_embedding", "has_head"), list(product([False, True], repeat=3)))
def test_logits_are_those_of_the_weights_as_rounded(models, plan_of, backend, tied, has_embedding, has_head):
    _, arrays, facts = models[tied]
    passes: list[Any] = []
    wanted = dict(arrays)
    if has_embedding:
        passes.append(embedding_entry(4, 24, False))  # the last group of a row is smaller
        wanted[EMBEDDING] = rounded(arrays[EMBEDDING], 4, 24, False)
    if has_head:
        passes.append({"rtn": HEAD_ENTRY})
        wanted[HEAD] = rounded(arrays[HEAD], 8, 32, True)
    path = plan_of(tied, backend, passes)
    assert error(path, wanted, facts) < 1e-4
    with Plan.open(path) as plan:
        named = [name for name, chosen in ((EMBEDDING, has_embedding), (HEAD, has_head)) if chosen]
        assert set(plan.manifest.quantization) == set(named)
        rows = [row.layer for report in plan.manifest.passes for row in report.layers]
        assert rows == [name.removesuffix(".weight") for name in named]


@pytest.mark.parametrize("order", ["embedding first", "head first", "one entry"])
def test_both_are_rounded_from_the_original_in_any_order(models, plan_of, order):
    _, arrays, facts = models[True]
    entry = {"bits": 8, "group_size": 32, "symmetric": True, "ignore": []}
    alone = [{"rtn": {**entry, "only": [name]}} for name in ("embedding", "lm_head")]
    passes = {
        "embedding first": alone,
        "head first": alone[::-1],
        "one entry": [{"rtn": {**entry, "only": ["embedding", "lm_head"]}}],
    }[order]
    both = rounded(arrays[EMBEDDING], 8, 32, True)
    assert error(plan_of(True, "cpu", passes), {**arrays, EMBEDDING: both, HEAD: both}, facts) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(2, 16, False), (3, 20, True), (4, -1, True), (8, 32, False), (8, 48, True)]
)
def test_rows_of_every_width_are_read_as_rounded(models, plan_of, backend, bits, group, symmetric):
    _, arrays, facts = models[False]
    wanted = rounded(arrays[EMBEDDING], bits, COLUMNS if group == -1 else group, symmetric)
    path = plan_of(False, backend, [embedding_entry(bits, group, symmetric)])
    assert error(path, {**arrays, EMBEDDING: wanted}, facts) < 1e-4


def test_the_cpu_target_keeps_the_table_in_codes_and_reads_a_row_of_it(plan_of):
    with Plan.open(plan_of(True, "cpu", [embedding_entry(4, 32, False)])) as plan:
        listing = list(list_program(read_program(plan), lambda tensor: plan.spec(tensor).nbytes))
        line = next(line for line in listing if " embed " in line)
        # 64 codes of 4 bits, 2 scales of 2 bytes and 2 zero points of 1.
        assert line.split()[-4:] == ["int4", "g32", "zeros", "38"]
        # The tied head is the one place where the original rows are left.
        wide = [spec.name for spec in plan if spec.dtype in ("F32", "U8") and spec.nbytes >= 384 * COLUMNS * 4]
        assert wide == ["weights/lm_head.weight"]


def test_onnxruntime_looks_codes_up_before_it_makes_numbers_of_them(plan_of):
    import onnx

    with Plan.open(plan_of(False, "onnxruntime", [embedding_entry(4, 32, False)])) as plan:
        table = plan.spec(f"weights/{EMBEDDING}.codes")
        assert (table.dtype, table.shape) == ("U8", (384, COLUMNS))
        graph = onnx.load_from_string(plan.blob("program/model.onnx")).graph
    made = {output: node for node in graph.node for output in node.output}
    rows = next(node for node in graph.node if node.op_type == "DequantizeLinear")
    assert [made[name].op_type for name in rows.input] == ["Gather"] * 3
    tables = [f"{EMBEDDING}.{part}" for part in ("codes", "scales", "zeros")]
    assert [made[name].input[0] for name in rows.input] == tables
