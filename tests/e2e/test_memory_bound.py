"""Memory of a weight pass is bounded by a layer, not by the model: twice the layers, the same peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass
from optimc_passes.cache import ArtifactCache
from optimc_passes.calibrate import Calibration
from optimc_passes.checkpoint import Checkpoint, TokenizerAssets
from optimc_passes.pipeline_options import PipelineOptions
from optimc_passes.quantize.gptq import Gptq, GptqConfig
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.walk.host_bytes import walk_host_bytes
from optimc_passes.weight_stage import run_weight_stage
from optimc_passes.weights import Dense, WeightStore

HIDDEN, INTERMEDIATE, TOKENS = 512, 1408, 8 * 96
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)


def artifact(layers: int) -> Artifact:
    """A model whose weights are drawn when they are looked at, so that nothing but the pass holds them."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    store = WeightStore({name: _drawn(seed, shape) for seed, (name, shape) in enumerate(shapes.items())})
    rows = tuple(np.random.default_rng(1).integers(0, 256, 96).astype(np.int32) for _ in range(TOKENS // 96))
    checkpoint = Checkpoint("drawn", "e" * 64, config, store, TokenizerAssets(None, None), bos=None, eos=(), pad=None)
    return Artifact.start(checkpoint, Calibration(rows, "c" * 64, TOKENS, "random"))


def _drawn(seed: int, shape: tuple[int, ...]) -> Dense:
    def read() -> Any:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return np.random.default_rng(seed).standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)

    return Dense(shape, np.dtype(np.float32), read)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", [Rtn(RtnConfig()), Gptq(GptqConfig())], ids=["rtn", "gptq"])
def test_the_peak_does_not_grow_with_the_number_of_layers(pass_: Pass[Any], tmp_path: Path):
    def peak(layers: int) -> int:
        options = PipelineOptions(cache=ArtifactCache(tmp_path / str(layers)))
        return run_weight_stage([pass_], artifact(layers), options)[1][0].peak_bytes

    peak(1)  # what libraries set up once is not counted
    four, eight = peak(4), peak(8)
    # Weights of four layers more would be four times LAYER_BYTES; a quarter of one is the allocator's play.
    assert eight - four < max(0.1 * four, LAYER_BYTES / 4)
    # And what is told beforehand, when a limit is set, is enough.
    assert eight < 1.1 * walk_host_bytes(artifact(8)).total
