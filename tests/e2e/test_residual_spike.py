"""Residuals beyond what float16 holds: a checkpoint in half precision still answers as the float32 model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from optimc_runtime.engine import Engine

TOKENS = np.random.default_rng(3).integers(2, 380, 60)


@pytest.fixture(scope="module")
def spiked(tiny_model: LlamaForCausalLM) -> Callable[[torch.dtype], LlamaForCausalLM]:
    """A model whose residual peaks at 1e5, in the numbers a dtype has, computed in float32."""

    def make(dtype: torch.dtype) -> LlamaForCausalLM:
        import copy

        model = copy.deepcopy(tiny_model)
        seen: list[float] = []
        layer = model.model.layers[1]
        with torch.no_grad():
            hook = layer.register_forward_hook(lambda _m, _args, out: seen.append(float(out.abs().max())))
            model(torch.from_numpy(TOKENS)[None])
            layer.mlp.down_proj.weight.mul_(2.4e5 / seen[0])
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
            model(torch.from_numpy(TOKENS)[None])
        hook.remove()
        assert seen[1] > 1e5
        return model

    return make


@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "cpu"), ("float16", "cpu"), ("bfloat16", "onnxruntime")])
def test_a_residual_of_1e5_keeps_argmax(
    dtype: str, backend: str, spiked: Any, tiny_folder: Path, build: Any, tmp_path: Path
):
    model = spiked(getattr(torch, dtype))
    folder = tmp_path / "checkpoint"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    target = {"backend": backend}
    result = build(f"spike-{dtype}-{backend}", model=str(folder), passes=["fuse"], target=target, verify="shapes")
    engine = Engine.load(result.path)
    try:
        logits = engine.score(TOKENS.tolist())
    finally:
        engine.close()
    assert np.isfinite(logits).all()
    assert np.array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    # What the spike drowns has lost its digits in float32 too: logits agree to two, as their order shows.
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
