"""Weights and activations in 8 bits: the engine multiplies what a plain model with rounded inputs says it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from optimc.plan import Plan
from optimc.recipe import CalibrationSpec
from optimc_passes.artifact import Artifact
from optimc_passes.calibrate import load_tokens
from optimc_passes.load import load_checkpoint
from optimc_passes.quantize.smoothquant import SmoothQuant, SmoothQuantConfig
from optimc_passes.weights import Dense, Quantized
from optimc_runtime.engine import Engine

CALIBRATION = {"samples": 16, "seq_len": 128}
TOKENS = np.random.default_rng(11).integers(2, 380, 100)
TARGETS: dict[str, dict[str, Any]] = {"token": {"activation_scales": "row"}, "static": {}}


@pytest.fixture(scope="module")
def plan(build: Any) -> Any:
    def make(activations: str, **target: Any) -> Path:
        name = "-".join(["w8a8", activations, *map(str, target.values())])
        passes = [{"smoothquant": {"activations": activations}}, "fuse"]
        return build(name, passes=passes, target={**TARGETS[activations], **target}, calibration=CALIBRATION).path

    return make


@pytest.fixture(scope="module")
def quantized(tiny_folder: Path, cache_dir: Path) -> Any:
    """The weights the build computes, by computing them once more."""

    def make(activations: str) -> Artifact:
        checkpoint = load_checkpoint(str(tiny_folder), cache_dir=cache_dir)
        calibration = load_tokens(CalibrationSpec(**CALIBRATION), checkpoint.tokenizer.tokenizer_json)
        config = SmoothQuantConfig(activations=activations)
        return SmoothQuant(config)(Artifact.start(checkpoint, calibration)).artifact

    return make


def reference(folder: Path, artifact: Artifact, *, rounds: bool = True) -> np.ndarray:
    """Logits of transformers with the artifact's weights, what linear layers read rounded to 8 bits."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    own = dict(model.named_parameters())

    def rounding(scale: float | None) -> Any:
        def hook(_module: Any, args: Any) -> Any:
            (x,) = args
            step = x.abs().amax(dim=-1, keepdim=True) / 127 if scale is None else torch.tensor(scale)
            return (torch.clamp(torch.round(x / step), -127, 127) * step,)

        return hook

    with torch.no_grad():
        for name, weight in artifact.weights.items():
            own[name].copy_(torch.tensor(weight.read() if isinstance(weight, Dense) else weight.dequantize()))
            if isinstance(weight, Quantized) and rounds:
                module = model.get_submodule(name.removesuffix(".weight"))
                module.register_forward_pre_hook(rounding(weight.activation_scale))
        return model(torch.from_numpy(TOKENS)[None], use_cache=False).logits[0].numpy()


def score(path: Path) -> np.ndarray:
    with Engine.load(path) as engine:
        return engine.score(TOKENS.tolist())


def kl(reference: np.ndarray, logits: np.ndarray) -> float:
    p, q = (
        rows.astype(np.float64) - np.logaddexp.reduce(rows.astype(np.float64), axis=-1)[:, None]
        for rows in (reference, logits)
    )
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("activations", ["token", "static"])
def test_the_engine_computes_products_of_rounded_activations(
    plan: Any, quantized: Any, tiny_folder: Path, activations: str
):
    artifact = quantized(activations)
    logits = score(plan(activations))
    said = kl(reference(tiny_folder, artifact), logits)
    exact = kl(reference(tiny_folder, artifact, rounds=False), logits)
    # A sum in another order moves some activation over the edge of a code: far less than rounding itself does.
    assert said < 0.1 * exact
    assert exact > 1e-5


def test_static_scales_are_computed_alike_by_onnxruntime_and_the_cpu_engine(plan: Any):
    cpu, portable = score(plan("static")), score(plan("static", backend="onnxruntime"))
    assert kl(portable, cpu) < 1e-4
    assert np.abs(cpu - portable).max() < 0.02 * np.abs(portable).max()


@pytest.mark.parametrize("activations", ["token", "static"])
def test_every_product_but_the_heads_reads_int8_with_one_scale(plan: Any, activations: str):
    with Plan.open(plan(activations)) as opened:
        program = opened.manifest.program
    linears = [op for op in program["ops"] if op["op"] == "linear"]
    assert len(linears) == 3 * 4 + 1  # qkv, o, gate with up, down; the head
    assert [op["name"] for op in linears if "quantized" not in op] == ["lm_head"]
    for op in linears[:-1]:
        weight = program["weights"][op["weight"]]
        assert (weight["bits"], weight["zeros"], weight["group"]) == (8, False, weight["features"])
        assert program["buffers"][op["quantized"]]["group"] == weight["features"]
    scales = [op.get("quantized_scale", op.get("scale")) for op in program["ops"] if op["op"] in ("norm", "quantize")]
    assert sum(scale is not None for scale in scales) == (3 * 4 if activations == "static" else 0)
