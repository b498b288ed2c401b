"""auto_bits: bits go where the model is sensitive, the budget holds, and predictions are of what was measured."""

from __future__ import annotations

import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.errors import PassError
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.quantize.auto_bits import AutoBits, AutoBitsConfig
from optimc_passes.quantize.awq import Awq, AwqConfig
from optimc_passes.quantize.gptq import Gptq, GptqConfig
from optimc_passes.quantize.kv_ranges import round_by_token
from optimc_passes.quantize.predictions import Predictions
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.quantize.unit_options import priced, units_of
from optimc_passes.weights import Dense, Quantized

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LAYER_ELEMENTS = {"attention_in": 64 * 128, "o_proj": 64 * 64, "mlp_in": 64 * 192, "down_proj": 64 * 96}


def make_model(**facts: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **facts})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[1] ** 0.5)
        model.lm_head.weight *= 3
        # The middle layer says next to nothing, the last one's output projection very much.
        for linear in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            linear.weight *= 0.02
        model.model.layers[2].mlp.down_proj.weight *= 4
    return model


def auto_bits(artifact: Artifact, **options: Any) -> Any:
    return AutoBits(AutoBitsConfig(**{"group_sizes": [32], **options}))(artifact)


def log_probabilities(artifact: Artifact, rows: Any, weights: Any = None) -> np.ndarray:
    model = make_model()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in (weights or artifact.weights).items():
            own[name].copy_(torch.tensor(weight.read() if isinstance(weight, Dense) else weight.dequantize()))
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        return torch.log_softmax(model(tokens, use_cache=False).logits.double(), dim=-1).numpy()


def divergence(artifact: Artifact, weights: Any, rows: Any) -> float:
    reference, actual = log_probabilities(artifact, rows), log_probabilities(artifact, rows, weights)
    return float((np.exp(reference) * (reference - actual)).sum(axis=-1).mean())


def bits_of(outcome: Any) -> dict[str, int | None]:
    return {layer: scheme.bits for layer, scheme in outcome.artifact.choices.schemes.items()}


def test_bits_go_where_the_model_is_sensitive_and_the_budget_holds(artifact_of: Any):
    outcome = auto_bits(artifact_of(make_model()), average_bits=4.0)
    bits = bits_of(outcome)
    assert len(bits) == 21
    assert bits["model.layers.1.mlp.down_proj"] < bits["model.layers.2.mlp.down_proj"]
    assert 3.5 < outcome.report.metrics["payload_bits"] <= 4.0
    # Nothing is rounded here.
    assert all(isinstance(weight, Dense) for weight in outcome.artifact.weights.values())


def test_siblings_get_one_format(artifact_of: Any):
    schemes = auto_bits(artifact_of(make_model()), average_bits=3.3).artifact.choices.schemes
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        assert len({schemes[f"{prefix}.self_attn.{name}_proj"] for name in "qkv"}) == 1
        assert schemes[f"{prefix}.mlp.gate_proj"] == schemes[f"{prefix}.mlp.up_proj"]


def test_what_is_measured_is_the_divergence_of_rounding_that_set_alone(artifact_of: Any):
    artifact = artifact_of(make_model())
    outcome = auto_bits(artifact, bits=[3], average_bits=3.0, windows=4)
    rows = artifact.calibration.tokens
    total = 0.0
    for names in (["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.down_proj"]):
        for layer in range(3):
            layers = [f"model.layers.{layer}.{name}" for name in names]
            one = Rtn(RtnConfig(bits=3, group_size=32, only=layers))(artifact).artifact
            expected = divergence(artifact, one.weights, rows)
            row = next(row for row in outcome.report.layers if row.layer == layers[0])
            measured = float(row.note.split("divergence ")[1].split(" ")[0])
            assert measured == pytest.approx(expected, rel=0.06, abs=1e-6)
            total += expected
    assert 0 < total < outcome.report.metrics["predicted_kl"]


def test_a_choice_beats_one_width_for_all_at_the_same_average(artifact_of: Any):
    artifact = artifact_of(make_model())
    chosen = auto_bits(artifact, average_bits=4.0, windows=4).artifact
    rounded = Rtn(RtnConfig(bits="auto"))(chosen).artifact
    even = Rtn(RtnConfig(bits=4, group_size=32))(artifact).artifact
    rows = artifact.calibration.tokens
    assert divergence(artifact, rounded.weights, rows) < 0.7 * divergence(artifact, even.weights, rows)


def test_it_composes_with_scales_before_and_rounding_behind(artifact_of: Any):
    artifact = artifact_of(make_model())
    scaled = Awq(AwqConfig(group_size=32, rounding="later"))(artifact).artifact
    chosen = auto_bits(scaled, average_bits=4.8).artifact
    assert chosen.weights is scaled.weights or dict(chosen.weights) == dict(scaled.weights)
    final = Gptq(GptqConfig(bits="auto"))(chosen).artifact
    widths = {name: weight.bits for name, weight in final.weights.items() if isinstance(weight, Quantized)}
    assert widths == {f"{layer}.weight": bits for layer, bits in bits_of_choices(chosen).items()}
    assert len(set(widths.values())) > 1


def bits_of_choices(artifact: Artifact) -> dict[str, int | None]:
    return {layer: scheme.bits for layer, scheme in artifact.choices.schemes.items()}


def test_bytes_are_counted_as_stored(artifact_of: Any):
    artifact = artifact_of(make_model())
    # 4-bit codes, a float16 scale and a byte of zero point per group of 32: all layers.
    elements = 3 * sum(LAYER_ELEMENTS.values())
    cheapest = elements // 2 + 3 * elements // 32
    with pytest.raises(
        PassError, match=f"max_bytes {cheapest - 1} is too little: the cheapest choice takes {cheapest}"
    ):
        auto_bits(artifact, max_bytes=cheapest - 1)
    outcome = auto_bits(artifact, max_bytes=cheapest)
    assert set(bits_of(outcome).values()) == {4}  # 2 and 3 bits are stored in 4 and save nothing
    assert outcome.report.metrics["stored_bytes"] == cheapest
    more = auto_bits(artifact, max_bytes="64KiB")
    assert cheapest < more.report.metrics["stored_bytes"] <= 65536
    assert more.report.metrics["predicted_kl"] < outcome.report.metrics["predicted_kl"]


def test_group_sizes_are_chosen_where_scales_cost_bytes(artifact_of: Any):
    artifact = artifact_of(make_model())
    elements = 3 * sum(LAYER_ELEMENTS.values())
    outcome = auto_bits(artifact, bits=[4], group_sizes=[16, 32, -1], max_bytes=elements // 2 + 3 * elements // 26)
    groups = {scheme.group for scheme in outcome.artifact.choices.schemes.values()}
    assert len(groups) > 1
    free = auto_bits(artifact, bits=[4], group_sizes=[16, 32, -1], average_bits=4.0)
    assert {scheme.group for scheme in free.artifact.choices.schemes.values()} == {16}


def test_a_layer_may_stay_dense_if_allowed(artifact_of: Any):
    outcome = auto_bits(artifact_of(make_model()), bits=[4], dense=True, average_bits=8.0)
    bits = bits_of(outcome)
    assert bits["model.layers.1.mlp.down_proj"] == bits["model.layers.1.self_attn.o_proj"] == 4
    assert None in bits.values()
    assert outcome.report.metrics["payload_bits"] <= 8.0
    assert any("stay dense" in line for line in outcome.report.decisions)


def test_a_layer_that_no_group_size_fits_stays_dense_if_allowed(artifact_of: Any):
    others = 4 * 3 * sum(size for name, size in LAYER_ELEMENTS.items() if name != "down_proj")
    options = {"bits": [4], "group_sizes": [48], "dense": True, "max_bytes": others + 16384}
    outcome = auto_bits(artifact_of(make_model()), **options)
    bits = bits_of(outcome)
    assert bits["model.layers.1.mlp.down_proj"] == 4  # 96 columns; all others have 64
    assert bits["model.layers.1.self_attn.o_proj"] is None
    row = next(row for row in outcome.report.layers if row.layer == "model.layers.1.self_attn.o_proj")
    assert row.note == "model.layers.1.self_attn.o_proj: none of the group sizes divides its columns"


def test_the_frontier_runs_from_the_cheapest_to_the_best_and_marks_the_choice(artifact_of: Any):
    frontier = auto_bits(artifact_of(make_model()), average_bits=4.0).report.frontier
    assert frontier[0].bits == 2
    assert frontier[-1].bits == 8
    assert [point.chosen for point in frontier].count(True) == 1
    assert all(later.bits > point.bits and later.kl < point.kl for point, later in pairwise(frontier))


def test_the_head_can_be_chosen_for(artifact_of: Any):
    artifact = artifact_of(make_model())
    outcome = auto_bits(artifact, average_bits=4.0, ignore=[], windows=4)
    assert bits_of(outcome)["lm_head"] in (2, 3, 4, 8)
    rounded = Rtn(RtnConfig(bits=3, group_size=32, only=["lm_head"], ignore=[]))(artifact).artifact
    expected = divergence(artifact, rounded.weights, artifact.calibration.tokens)
    row = next(row for row in outcome.report.layers if row.layer == "lm_head")
    assert float(row.note.split("divergence ")[1].split(" ")[0]) == pytest.approx(expected, rel=0.06)


def test_the_caches_formats_are_chosen_by_layer(artifact_of: Any):
    model = make_model()
    with torch.no_grad():
        # Attention of one layer is peaked by loud keys: rounding them moves its weights.
        model.model.layers[0].self_attn.k_proj.weight *= 12
    artifact = artifact_of(model)
    outcome = auto_bits(artifact, average_bits=4.0, kv={"dtypes": ["int8", "int4"], "average_bits": 6.0})
    dtypes = [choice.dtype for choice in outcome.artifact.choices.kv]
    assert len(dtypes) == 3
    assert dtypes.count("int8") == 1
    assert dtypes[0] == "int8"
    assert any("KV cache" in line for line in outcome.report.decisions)


def test_a_cache_measurement_is_that_of_rounded_keys_and_values(artifact_of: Any):
    from optimc_passes.quantize.sensitivity import Request, measure

    artifact = artifact_of(make_model())
    rows = artifact.calibration.tokens
    found = measure(artifact, Request((), {}, ("int4", "int8", "bfloat16", "float32")), rows, PassContext())
    assert len(found.kv) == 3
    for layer in found.kv:
        assert layer["float32"] == pytest.approx(0, abs=1e-6)
        assert layer["int4"] > 10 * layer["int8"] > 0
    # The last layer, by hand: transformers' attention with keys and values replaced where they are made.
    model = make_model()
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in artifact.weights.items():
            own[name].copy_(torch.tensor(weight.read()))
        from transformers.models.llama import modeling_llama

        attention = modeling_llama.eager_attention_forward

        def rounded(module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            if module.layer_idx == 2:
                k, v = (torch.from_numpy(round_by_token(value.numpy(), "int4")) for value in (k, v))
            return attention(module, q, k, v, *args, **kwargs)

        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        exact = torch.log_softmax(model(tokens, use_cache=False).logits.double(), dim=-1)
        model.set_attn_implementation("eager")
        modeling_llama.eager_attention_forward = rounded
        try:
            other = torch.log_softmax(model(tokens, use_cache=False).logits.double(), dim=-1)
        finally:
            modeling_llama.eager_attention_forward = attention
    expected = float((exact.exp() * (exact - other)).sum(dim=-1).mean())
    assert found.kv[2]["int4"] == pytest.approx(expected, rel=0.02)


def test_a_measurement_that_was_stopped_goes_on_behind_its_last_layer(
    artifact_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    artifact = artifact_of(make_model())
    options = {"average_bits": 4.0, "group_sizes": (32,), "ignore": (), "kv": {"dtypes": ("int8", "int4")}}
    pass_ = AutoBits(AutoBitsConfig(**options))
    measured: list[float] = []
    plain = Predictions.divergence

    def counted(self: Predictions, *args: Any) -> float:
        measured.append(plain(self, *args))
        return measured[-1]

    def stop(done: int, _total: int, _label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Predictions, "divergence", counted)
    whole = pass_(artifact)
    assert whole.report.resumed_at is None
    all_of_them, measured[:] = list(measured), []
    partial = tmp_path / "partial"
    with pytest.raises(KeyboardInterrupt):
        pass_(artifact, PassContext(progress=stop, partial=partial))
    # Four sets of layers and two formats of the cache in each of two layers.
    assert measured == all_of_them[:12]
    measured.clear()
    resumed = pass_(artifact, PassContext(partial=partial))
    assert measured == all_of_them[12:]  # the third layer and the head
    assert len(measured) == 7
    assert resumed.report.resumed_at == 2
    assert resumed.artifact.choices == whole.artifact.choices
    assert without_times(resumed) == without_times(whole)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.calibrate import Calibration
from optimc_passes.calibrate import Calibration
from optimc_passes.load import load_checkpoint
from optimc_passes.quantize.auto_bits import AutoBits, AutoBitsConfig

folder, rows, partial = sys.argv[1:]

def progress(done, total, label):
    if done == 1:
        os.kill(os.getpid(), signal.SIGKILL)

tokens = tuple(np.load(rows))
artifact = Artifact.start(load_checkpoint(folder, cache_dir=Path(folder)), Calibration(tokens, "digest", 96, "random"))
context = PassContext(progress=progress, partial=Path(partial))
AutoBits(AutoBitsConfig(average_bits=4.0, group_sizes=(32,)))(artifact, context)
"""


@pytest.mark.slow
def test_a_process_killed_while_measuring_leaves_what_it_had_measured(artifact_of: Any, tmp_path: Path):
    artifact = artifact_of(make_model())
    np.save(tmp_path / "rows.npy", np.stack(artifact.calibration.tokens))
    partial = tmp_path / "partial"
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(tmp_path / "rows.npy"), str(partial)]
    killed = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pass_ = AutoBits(AutoBitsConfig(average_bits=4.0, group_sizes=(32,)))
    resumed = pass_(artifact, PassContext(partial=partial))
    assert resumed.report.resumed_at == 1
    whole = pass_(artifact)
    assert resumed.artifact.choices == whole.artifact.choices
    assert without_times(resumed) == without_times(whole)


def test_a_measurement_that_was_harmed_starts_over(artifact_of: Any, tmp_path: Path):
    artifact = artifact_of(make_model())
    pass_ = AutoBits(AutoBitsConfig(average_bits=4.0, group_sizes=(32,)))
    partial = tmp_path / "partial"
    whole = pass_(artifact, PassContext(partial=partial))
    progress = partial / "progress.json"
    written = progress.read_text()
    assert '"divergence of model.layers.0.mlp.down_proj": 0.' in written
    progress.write_text(written.replace('"divergence of model.layers.0.mlp.down_proj": 0.', '"divergence of x": 0.'))
    again = pass_(artifact, PassContext(partial=partial))
    assert again.report.resumed_at is None
    assert without_times(again) == without_times(whole)


def without_times(outcome: Any) -> dict[str, Any]:
    return {**outcome.report.model_dump(), "seconds": 0, "peak_bytes": 0, "resumed_at": None}


def test_memory_that_is_short_sends_activations_to_files_and_changes_nothing(artifact_of: Any, tmp_path: Path):
    artifact = artifact_of(make_model())
    pass_ = AutoBits(AutoBitsConfig(average_bits=4.0, group_sizes=(32,)))
    plain, short = pass_(artifact), pass_(artifact, PassContext(max_host_bytes=1, scratch=tmp_path))
    assert short.artifact.choices == plain.artifact.choices
    assert short.report.frontier == plain.report.frontier


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_bits": 2.5, "bits": [4, 8]}, "average_bits 2.5 is too little: the cheapest choice takes 4"),
        ({"average_bits": 4.0, "group_sizes": [40]}, "none of the group sizes 40 divides 64 columns"),
        ({"average_bits": 4.0, "only": ["nothing.*"]}, "matches no linear layer"),
        ({"average_bits": 4.0, "kv": {"dtypes": ["int8"], "average_bits": 6.0}}, "below every format in int8"),
    ],
)
def test_what_cannot_be_is_refused_before_any_forward(
    artifact_of: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
):
    from optimc_passes.quantize import sensitivity

    monkeypatch.setattr(sensitivity, "measure", None)
    with pytest.raises(PassError, match=message):
        auto_bits(artifact_of(make_model()), **options)


def test_rounded_weights_are_refused_with_the_remedy(artifact_of: Any):
    rounded = Rtn(RtnConfig(group_size=32))(artifact_of(make_model())).artifact
    with pytest.raises(PassError, match="quantized already: 21 layers.*put auto_bits before the pass that rounds"):
        auto_bits(rounded, average_bits=4.0)


@pytest.mark.parametrize("budget", [{}, {"average_bits": 4.0, "max_bytes": 1000}])
def test_one_budget_is_given(budget: dict[str, Any]):
    with pytest.raises(ValidationError, match="give average_bits or max_bytes"):
        AutoBitsConfig(**budget)


def test_units_and_prices_by_hand(artifact_of: Any):
    from optimc_passes.quantize.linears import linear_weights

    linears = linear_weights(artifact_of(make_model()).checkpoint.config)
    units = units_of(linears)
    assert [unit.name for unit in units[:4]] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert units[-1].name == "lm_head"
    assert len(units) == 13
    two, eight, row, dense = priced(
        units[0], bits=(2, 8), group_sizes=(32, 48), symmetric=False, dense_bytes=None
    ) + priced(units[0], bits=(4,), group_sizes=(-1,), symmetric=True, dense_bytes=1234)
    assert (two.payload_bits, two.nbytes) == (2 * 8192, 8192 // 2 + 256 * 3)
    assert (eight.payload_bits, eight.nbytes) == (8 * 8192, 8192 + 256 * 3)
    assert (row.payload_bits, row.nbytes) == (4 * 8192, 8192 // 2 + 128 * 2)
    assert (dense.payload_bits, dense.nbytes) == (8 * 1234, 1234)
