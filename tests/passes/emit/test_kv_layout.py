"""The cache a plan describes: geometry from the graph, formats from the choices of passes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimc.errors import LoweringError
from optimc.plan import KvLayer
from optimc_passes import kv_weights
from optimc_passes.artifact import Artifact
from optimc_passes.choices import Choices, KvChoice
from optimc_passes.emit import TARGETS, LoweringOptions
from optimc_passes.emit.kv_layout import key_scale_tensors, kv_layout
from optimc_passes.graph.attach import attach_weights
from optimc_passes.weights import Dense, WeightStore

TOKEN = KvChoice("int8", "token", "dynamic", 0)
CHANNEL = KvChoice("int4", "channel", "calibrated", 96)
OPTIONS = LoweringOptions(16, None, "group", "float32", 64, 4)


def scales(layer: int) -> dict[str, Dense]:
    """Scales and minimums of a layer of the tiny decoder, [2, 8]."""
    ones = np.full((2, 8), 1 + layer, np.float64)
    return {kv_weights.key_scales(layer): Dense.of(ones), kv_weights.key_minimums(layer): Dense.of(-ones)}


def test_without_choices_all_layers_hold_one_dtype(tiny_decoder):
    layout = kv_layout(tiny_decoder().model, 16, "bfloat16")
    assert layout.dtypes == ("bfloat16",)
    assert set(layout.layers) == {KvLayer(num_kv_heads=2, head_dim=8, window=0)}
    assert key_scale_tensors(layout, {}) == []


def test_choices_become_layers_and_their_scales_tensors(tiny_decoder):
    layout = kv_layout(tiny_decoder(layers=3).model, 16, "float32", (TOKEN, CHANNEL, TOKEN))
    assert layout.dtype == "int8"
    assert [layout.dtype_of(layer) for layer in range(3)] == ["int8", "int4", "int8"]
    first, second, _ = layout.layers
    assert (first.dtype, first.keys, first.provenance, first.key_scales) == (None, "token", "dynamic", None)
    assert (second.keys, second.provenance, second.calibration_tokens) == ("channel", "calibrated", 96)
    tensors = {tensor.name: tensor for tensor in key_scale_tensors(layout, scales(1))}
    assert list(tensors) == ["kv/1/key_scales", "kv/1/key_minimums"]
    assert {(tensor.dtype, tensor.shape, tensor.load().dtype.name) for tensor in tensors.values()} == {
        ("F32", (2, 8), "float32")
    }
    assert tensors["kv/1/key_minimums"].load()[0, 0] == -2


def test_choices_for_another_number_of_layers_are_refused(tiny_decoder):
    with pytest.raises(LoweringError, match="chosen for 3 layers, the graph has 2"):
        kv_layout(tiny_decoder().model, 16, "float32", (TOKEN,) * 3)


def artifact(decoder, *kv: KvChoice) -> Artifact:
    graph = attach_weights(decoder.model, decoder.store)
    weights = WeightStore({**decoder.store, **scales(1)})
    return Artifact.start(decoder.checkpoint()).evolve(weights=weights, graph=graph, choices=Choices(kv=kv))


def test_the_cpu_target_lowers_what_was_chosen(tiny_decoder):
    lowered = TARGETS["cpu"](artifact(tiny_decoder(), TOKEN, CHANNEL), OPTIONS)
    assert [lowered.kv.dtype_of(layer) for layer in range(2)] == ["int8", "int4"]
    assert [tensor.name for tensor in lowered.tensors if tensor.name.startswith("kv/")] == [
        "kv/1/key_scales",
        "kv/1/key_minimums",
    ]


@pytest.mark.parametrize(("target", "dtype"), [("cpu", "fp8"), ("onnxruntime", "int8")])
def test_a_target_refuses_what_it_has_no_kernels_for(tiny_decoder, target, dtype):
    with pytest.raises(LoweringError, match=f"KV cache: no kernels for keys and values in {dtype}, use one of float32"):
        TARGETS[target](artifact(tiny_decoder(), KvChoice(dtype, "token", "dynamic", 0), TOKEN), OPTIONS)


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_fp8_is_told_what_it_waits_for(target):
    assert "fp8 needs an attention plugin" in (TARGETS[target].refuse_kv("fp8", OPTIONS) or "")


def test_what_a_cache_may_hold_is_the_targets_to_say():
    assert TARGETS["cpu"].refuse_kv("int4", OPTIONS) is None
    assert TARGETS["tensorrt"].refuse_kv("float16", OPTIONS) is None
    assert "float16, int8" in (TARGETS["tensorrt"].refuse_kv("bfloat16", OPTIONS) or "")
    assert TARGETS["tensorrt"].refuse_kv("bfloat16", replace(OPTIONS, precision="bfloat16")) is None
    assert "keys: token" in (TARGETS["tensorrt"].refuse_keys("channel") or "")
