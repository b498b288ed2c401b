"""The pass: which layers it rounds, what it reports, and what its result does not depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from optimc.errors import PassError
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext, PassOutcome
from optimc_passes.calibrate import Calibration
from optimc_passes.choices import Choices, Scheme
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.quantize.gptq import Gptq, GptqConfig
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.quality import QualityProbe
from optimc_passes.weights import Dense, Quantized, WeightStore

ROWS = tuple(np.random.default_rng(3).integers(0, 96, length).astype(np.int32) for length in (40, 11, 40, 40))
DOWN0, DOWN1 = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"


def start(family: Any, rows: Sequence[NDArray[np.int32]] = ROWS, weights: WeightStore | None = None) -> Artifact:
    artifact = Artifact.start(family.checkpoint, Calibration(tuple(rows), "c" * 64, sum(map(len, rows)), "random"))
    return artifact if weights is None else artifact.evolve(weights=weights)


def run(artifact: Artifact, context: PassContext | None = None, **options: Any) -> PassOutcome:
    return Gptq(GptqConfig(**{"group_size": 16, **options}))(artifact, context)


@pytest.fixture(scope="module")
def llama(make_family: Callable[..., Any]) -> Any:
    return make_family("llama")


def codes_of(outcome: PassOutcome) -> dict[str, NDArray[np.uint8]]:
    return {n: w.codes.read() for n, w in outcome.artifact.weights.items() if isinstance(w, Quantized)}


def same(first: PassOutcome, second: PassOutcome) -> bool:
    ours, theirs = first.artifact.weights, second.artifact.weights
    return ours.keys() == theirs.keys() and all(
        np.array_equal(weight.codes.read(), theirs[name].codes.read())
        and np.array_equal(weight.scales.read(), theirs[name].scales.read())
        for name, weight in ours.items()
        if isinstance(weight, Quantized)
    )


def test_every_family_is_rounded_with_less_damage_than_by_rtn(family: Any):
    windows = np.random.default_rng(8).integers(0, 96, (2, 40)).astype(np.int32)
    probe = QualityProbe(family.checkpoint, windows, scratch=None, budget=Budget(None, 0))
    rows = np.random.default_rng(3).integers(0, 96, (12, 40)).astype(np.int32)
    rounded = run(start(family, list(rows)), bits=3)
    nearest = Rtn(RtnConfig(bits=3, group_size=16))(start(family))
    assert codes_of(rounded).keys() == codes_of(nearest).keys()
    _, kl = probe.measure(rounded.artifact.weights)
    _, kl_nearest = probe.measure(nearest.artifact.weights)
    assert kl < kl_nearest
    assert not [row for row in rounded.report.layers if row.fallback]


def test_a_row_per_layer_is_reported(llama: Any):
    report = run(start(llama)).report
    assert len(report.layers) == 14
    assert [row.layer for row in report.layers][:4] == [
        f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o")
    ]
    for row in report.layers:
        assert (row.bits, row.group, row.damping, row.fallback) == (4, 16, 0.01, None)
        assert row.error is not None
        assert 0 < row.error < 0.2
        rows, columns = llama.checkpoint.weights[f"{row.layer}.weight"].shape
        assert row.bytes_before == 4 * rows * columns
        # Half a byte per code; half a byte and a float32 per group of 16.
        assert row.bytes_after == rows * columns // 2 + rows * columns // 16 * 9 // 2
    assert report.calibration_tokens == 131
    assert report.resumed_at is None
    assert report.metrics["layers"] == 14
    assert report.metrics["payload_bits"] == 4
    assert report.decisions == ("lm_head is left as it is: ignored",)


def test_reported_errors_are_those_of_layer_outputs(llama: Any):
    """Of layer 0, whose inputs rounding has not touched: q, k and v read the first norm's output."""
    import torch

    outcome = run(start(llama))
    seen = []
    layer = llama.model.model.layers[0]
    hook = layer.self_attn.q_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0][0].numpy()))
    with torch.no_grad():
        for row in ROWS:
            llama.model(torch.from_numpy(row.astype(np.int64))[None])
    hook.remove()
    x = np.concatenate(seen).astype(np.float64)
    rows = {row.layer: row for row in outcome.report.layers}
    for name in ("q", "k", "v"):
        full = f"model.layers.0.self_attn.{name}_proj"
        weight = llama.checkpoint.weights[f"{full}.weight"].read()
        rounded = outcome.artifact.weights[f"{full}.weight"]
        assert isinstance(rounded, Quantized)
        wanted = np.linalg.norm(x @ (weight - rounded.dequantize()).T) / np.linalg.norm(x @ weight.T)
        assert rows[full].error == pytest.approx(wanted, rel=1e-3)


def test_refusal_runs_no_forward(llama: Any, monkeypatch: pytest.MonkeyPatch):
    from optimc_passes.walk import walk

    def explode(*_: Any) -> None:
        raise AssertionError("the model was made")

    def read() -> NDArray[np.float32]:
        raise AssertionError("data was read")

    monkeypatch.setattr(walk, "LayeredModel", explode)
    lazy = WeightStore({n: Dense(w.shape, w.dtype, read) for n, w in llama.checkpoint.weights.items()})
    with pytest.raises(PassError) as caught:
        run(start(llama, weights=lazy), group_size=64)
    assert str(caught.value).startswith(
        "gptq failed after []: 96 columns (2 layers, e.g. model.layers.0.mlp.down_proj): not divisible by group_size 64"
    )


@pytest.mark.parametrize(("group_size", "groups"), [(40, 3), (-1, 1)])
def test_ragged_and_whole_row_round_trip(llama: Any, group_size: int, groups: int):
    weights = run(start(llama), group_size=group_size, ragged="ragged").artifact.weights
    weight = weights[f"{DOWN0}.weight"]
    assert isinstance(weight, Quantized)
    assert weight.scales.shape == (64, groups)
    original = llama.checkpoint.weights[f"{DOWN0}.weight"].read()
    # A step either way at most, but for clamped outliers of other columns' errors: close to the original as a whole.
    assert np.linalg.norm(weight.dequantize() - original) < 0.2 * np.linalg.norm(original)


def test_same_seed_twice_is_byte_identical(llama: Any, tmp_path: Path):
    first = run(start(llama), sweeps=1, refit=True)
    assert same(run(start(llama), sweeps=1, refit=True), first)
    # Nor does a limit on memory show, which sends activations to files.
    assert same(run(start(llama), PassContext(scratch=tmp_path, max_host_bytes=1), sweeps=1, refit=True), first)


def test_other_text_gives_other_codes(llama: Any):
    other = [row[::-1].copy() for row in ROWS]
    assert not same(run(start(llama, other)), run(start(llama)))


def test_the_head_is_rounded_on_what_it_reads(llama: Any):
    outcome = run(start(llama), ignore=())
    head = outcome.artifact.weights["lm_head.weight"]
    assert isinstance(head, Quantized)
    embedding = outcome.artifact.weights["model.embed_tokens.weight"]
    assert isinstance(embedding, Dense)
    assert np.array_equal(embedding.read(), llama.checkpoint.weights["model.embed_tokens.weight"].read())
    nearest = quantize_affine(embedding.read(), 4, 16, symmetric=False)
    assert not np.array_equal(head.codes.read(), nearest.codes)
    assert outcome.report.layers[-1].layer == "lm_head"
    assert outcome.report.layers[-1].error is not None
    assert any("lm_head is quantized apart" in decision for decision in outcome.report.decisions)


def test_only_what_is_named_is_rounded_and_the_rest_sees_it(llama: Any):
    outcome = run(start(llama), only=("*.q_proj", "*.down_proj"))
    assert sorted(codes_of(outcome)) == sorted(
        f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    )


def test_schemes_chosen_before_are_followed(llama: Any):
    schemes = {
        DOWN0: Scheme(8, 32, True),
        DOWN1: Scheme(None, 32, True),
        "model.layers.0.mlp.up_proj": Scheme(3, -1, False),
    }
    outcome = run(start(llama).evolve(choices=Choices(schemes)), bits="auto")
    weights = outcome.artifact.weights
    assert {name: (w.bits, w.group, w.symmetric) for name, w in weights.items() if isinstance(w, Quantized)} == {
        f"{DOWN0}.weight": (8, 32, True),
        "model.layers.0.mlp.up_proj.weight": (3, 64, False),
    }


def test_auto_without_choices_is_refused(llama: Any):
    with pytest.raises(PassError, match="no pass before has chosen any; put auto_bits before this pass"):
        run(start(llama), bits="auto")


def test_a_layer_whose_inputs_are_broken_falls_back_and_says_so(llama: Any):
    """An infinite norm weight makes every input of the second half of layer 1 infinite."""
    name = "model.layers.1.post_attention_layernorm.weight"
    weights = llama.checkpoint.weights.replace({name: Dense.of(np.full(64, np.inf, np.float32))})
    report = run(start(llama, weights=weights)).report
    broken = [row for row in report.layers if row.fallback]
    assert [row.layer.rpartition(".")[2] for row in broken] == ["gate_proj", "up_proj", "down_proj"]
    assert all(row.damping is None for row in broken)
    assert sum("is rounded to nearest: the second moment" in decision for decision in report.decisions) == 3


def test_one_token_is_too_little_to_calibrate_on(llama: Any):
    report = run(start(llama, [ROWS[0][:1]])).report
    assert all(row.fallback == "1 calibration token says nothing about its inputs" for row in report.layers)


def test_it_needs_calibration_text(llama: Any):
    with pytest.raises(PassError, match="it needs calibration text; add a calibration section to the recipe"):
        run(Artifact.start(llama.checkpoint))


def test_gptaq_aims_at_the_original_model(llama: Any):
    assert not same(run(start(llama), gptaq=True), run(start(llama)))
