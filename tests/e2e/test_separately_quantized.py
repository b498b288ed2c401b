"""Projections that were quantized apart: the fused graph computes what the unfused one does, or says why it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from transformers import LlamaConfig

from optimc_passes.frontend import export_graph
from optimc_passes.fuse.apply_rules import apply_rules
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.rule import FusionPass, recorder_of
from optimc_passes.graph.attach import attach_weights
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense, Quantized, Weight, WeightStore

HIDDEN, LAYERS = 64, 2
TOLERANCE = 1e-5
ATTENTION = [f"self_attn.{name}_proj" for name in "qkv"]
MLP = ["mlp.gate_proj", "mlp.up_proj"]
ORDERS = [np.random.default_rng(seed).permutation(HIDDEN).astype(np.int32) for seed in range(3)]


@pytest.fixture(scope="module")
def exported() -> ir.Model:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return export_graph(config, max_seq_len=64).model


def quantized(
    weight: np.ndarray,
    *,
    bits: int = 4,
    group: int = 16,
    symmetric: bool = False,
    order: np.ndarray | None = None,
    scale: float | None = None,
) -> Quantized:
    codes, scales, zeros = quantize_affine(
        weight if order is None else weight[:, order], bits, group, symmetric=symmetric
    )
    return Quantized(
        codes=Dense.of(codes),
        scales=Dense.of(scales),
        zeros=None if zeros is None else Dense.of(zeros),
        bits=bits,
        group=group,
        permutation=None if order is None else Dense.of(order),
        activation_scale=scale,
    )


def fused(exported: ir.Model, change: Callable[[str, np.ndarray], Weight | None]) -> tuple[float, dict[str, list[str]]]:
    """Relative error of the fused graph's logits, and reasons by pass; `change` quantizes layer 0's weights."""
    rng = np.random.default_rng(1)
    weights: dict[str, Weight] = {}
    for value in exported.graph.inputs[3:]:
        shape = tuple(int(dim) for dim in value.shape)
        array = rng.standard_normal(shape).astype(np.float32)
        array = array / np.float32(np.sqrt(shape[-1])) if len(shape) == 2 else np.abs(array) + np.float32(0.5)
        part = value.name.removeprefix("model.layers.0.").removesuffix(".weight")
        own = change(part, array) if value.name.startswith("model.layers.0.") else None
        weights[value.name] = own if own is not None else Dense.of(array)
    model = attach_weights(exported, WeightStore(weights))
    probe = Probe.of_vocabulary(96, 20)
    before = evaluate(model, probe)
    reasons: dict[str, list[str]] = {}
    for pass_ in GRAPH_PASSES:
        if issubclass(pass_, FusionPass):
            recorder = recorder_of(pass_.rules)
            apply_rules(model, [rule.compiled() for rule in pass_.rules], recorder)
            reasons[pass_.name] = [entry.reason for entry in recorder.report().declined]
    after = evaluate(model, probe)
    return float(np.abs(after - before).max() / np.abs(before).max()), reasons


def test_three_permutations(exported: ir.Model):
    orders = dict(zip(ATTENTION, ORDERS, strict=True))
    error, reasons = fused(exported, lambda part, w: quantized(w, order=orders[part]) if part in orders else None)
    assert error < TOLERANCE
    assert any("permuted differently" in reason for reason in reasons["merge_qkv"])


def test_one_permutation_for_all_is_merged(exported: ir.Model):
    error, reasons = fused(exported, lambda part, w: quantized(w, order=ORDERS[0]) if part in ATTENTION else None)
    assert error < TOLERANCE
    assert reasons["merge_qkv"] == []


def test_gate_and_up_whose_ranges_are_eight_apart_keep_their_scales(exported: ir.Model):
    def change(part: str, weight: np.ndarray) -> Weight | None:
        if part not in MLP:
            return None
        return quantized(weight * np.float32(8 if part == MLP[0] else 1))

    error, reasons = fused(exported, change)
    assert error < TOLERANCE
    assert reasons["merge_gate_up"] == []


@pytest.mark.parametrize("dense", ATTENTION)
def test_one_left_dense(exported: ir.Model, dense: str):
    error, reasons = fused(exported, lambda part, w: quantized(w) if part in ATTENTION and part != dense else None)
    assert error < TOLERANCE
    assert any("stored differently" in reason for reason in reasons["merge_qkv"])


@pytest.mark.parametrize("symmetric", [False, True])
def test_four_and_eight_bits(exported: ir.Model, symmetric: bool):
    widths = dict(zip([*ATTENTION, *MLP], (4, 4, 8, 8, 4), strict=True))

    def change(part: str, weight: np.ndarray) -> Weight | None:
        return quantized(weight, bits=widths[part], symmetric=symmetric) if part in widths else None

    error, reasons = fused(exported, change)
    assert error < TOLERANCE
    for name in ("merge_qkv", "merge_gate_up"):
        assert any("stored differently" in reason for reason in reasons[name])


@pytest.mark.parametrize("symmetric", [False, True])
def test_three_and_four_bits_share_a_type_and_each_keeps_its_zero_point(exported: ir.Model, symmetric: bool):
    widths = dict(zip([*ATTENTION, *MLP], (3, 4, 2, 4, 3), strict=True))

    def change(part: str, weight: np.ndarray) -> Weight | None:
        return quantized(weight, bits=widths[part], symmetric=symmetric) if part in widths else None

    error, reasons = fused(exported, change)
    assert error < TOLERANCE
    assert reasons["merge_qkv"] == reasons["merge_gate_up"] == []


def test_group_sizes_that_differ(exported: ir.Model):
    groups = dict(zip(ATTENTION, (16, 32, 16), strict=True))
    error, reasons = fused(exported, lambda part, w: quantized(w, group=groups[part]) if part in groups else None)
    assert error < TOLERANCE
    assert any("in groups of 16" in reason and "in groups of 32" in reason for reason in reasons["merge_qkv"])


def test_one_static_scale_for_each(exported: ir.Model):
    """A scale of q's must never round what k and v read: they stay apart, and say so."""
    scales = dict(zip(ATTENTION, (0.04, 0.03, 0.02), strict=True))

    def change(part: str, weight: np.ndarray) -> Weight | None:
        if part not in scales:
            return None
        return quantized(weight, bits=8, group=HIDDEN, symmetric=True, scale=scales[part])

    error, reasons = fused(exported, change)
    assert error < TOLERANCE
    assert any("different inputs" in reason for reason in reasons["merge_qkv"])


def test_one_static_scale_for_all_is_merged(exported: ir.Model):
    def change(part: str, weight: np.ndarray) -> Weight | None:
        if part not in ATTENTION:
            return None
        return replace(quantized(weight, bits=8, group=HIDDEN, symmetric=True), activation_scale=0.03)

    error, reasons = fused(exported, change)
    assert error < 1e-3  # a sum in another order may move an activation over the edge of a code
    assert reasons["merge_qkv"] == []
