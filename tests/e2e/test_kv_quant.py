"""`kv_quant` from recipe to answers: what the plan says of its cache is what the engine keeps."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from optimc.build import BuildOptions, plan_build
from optimc.errors import ConfigError
from optimc.plan import Plan, PlanTensor, write_plan
from optimc_passes.calibrate import evaluation_windows
from optimc_runtime import _native
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.load import load_executor
from optimc_runtime.request import SamplingParams

CALIBRATION = {"samples": 32, "seq_len": 128}
TEXT = np.random.default_rng(11).integers(2, 380, 120)


def kv_passes(**options):
    return [{"kv_quant": options}, "fuse"]


@pytest.fixture(scope="module")
def channel_plan(build) -> Path:
    return build("kv-channel", passes=kv_passes(keys="channel"), calibration=CALIBRATION).path


@pytest.fixture(scope="module")
def mixed_plan(build) -> Path:
    options = {"dtype": "int4", "keys": "channel", "skip_layers": [0], "float_dtype": "float32"}
    return build("kv-mixed", passes=kv_passes(**options), calibration=CALIBRATION).path


def score(path: Path, tokens: NDArray = TEXT) -> NDArray[np.float32]:
    """Logits of every position of a text."""
    with Engine.load(path) as engine:
        return engine.score(tokens.tolist())


def kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Mean divergence in nats per token."""
    p, q = (
        rows.astype(np.float64) - np.logaddexp.reduce(rows.astype(np.float64), axis=-1)[:, None]
        for rows in (reference, logits)
    )
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def with_tensors(path: Path, target: Path, change: Callable[[str, NDArray], NDArray]) -> Path:
    """Copy a plan with its tensors changed."""
    with Plan.open(path) as plan:
        tensors = [
            PlanTensor(spec.name, spec.dtype, spec.shape, lambda name=spec.name: change(name, plan.tensor(name)))
            for spec in plan
        ]
        write_plan(target, plan.manifest.model_copy(update={"tensors": {}}), tensors)
    return target


def test_the_plan_says_where_its_scales_come_from_and_holds_them(channel_plan):
    with Plan.open(channel_plan, verify=True) as plan:
        kv = plan.manifest.kv
        assert (kv.dtype, len(kv.layers), kv.is_uncalibrated) == ("int8", 3, False)
        for index, layer in enumerate(kv.layers):
            assert (layer.keys, layer.provenance, layer.calibration_tokens) == ("channel", "calibrated", 4096)
            scales = plan.tensor(f"kv/{index}/key_scales")
            assert scales.shape == (2, 16)
            assert (scales > 0).all()
        assert len({plan.tensor(f"kv/{index}/key_scales").tobytes() for index in range(3)}) == 3


def test_a_cache_of_8_bits_moves_predictions_little_and_of_4_bits_more(
    fp32_plan, channel_plan, mixed_plan, build, tiny_folder
):
    """On text like that of calibration: beyond it keys saturate, and a random model takes that hard."""
    (text,) = evaluation_windows((tiny_folder / "tokenizer.json").read_bytes(), windows=1, length=200)
    reference = score(fp32_plan, text)
    int8 = kl(reference, score(channel_plan, text))
    int4 = kl(reference, score(mixed_plan, text))
    token = kl(reference, score(build("kv-token", passes=kv_passes(keys="token")).path, text))
    assert 0 < int8 < 0.05
    assert 0 < token < 0.02
    assert int4 > 5 * int8


def test_skipped_layers_keep_their_dtype(mixed_plan):
    with Plan.open(mixed_plan) as plan:
        kv = plan.manifest.kv
        assert [kv.dtype_of(layer) for layer in range(3)] == ["float32", "int4", "int4"]
        assert [name for spec in plan if (name := spec.name).startswith("kv/")] == [
            f"kv/{layer}/key_{part}" for layer in (1, 2) for part in ("scales", "minimums")
        ]


def test_other_scales_give_other_logits(channel_plan, tmp_path):
    changed = with_tensors(
        channel_plan, tmp_path / "changed.plan", lambda name, array: array * 30 if "key_scales" in name else array
    )
    assert not np.array_equal(score(channel_plan), score(changed))
    same = with_tensors(channel_plan, tmp_path / "same.plan", lambda _name, array: array)
    assert np.array_equal(score(channel_plan), score(same))


def test_running_first_changes_nothing(channel_plan):
    cold = score(channel_plan)
    with Engine.load(channel_plan) as engine:
        engine.warm_up()
        engine.score(np.full(100, 7).tolist())
        engine.generate([[5] * 40], SamplingParams(max_tokens=20, temperature=0))
        assert np.array_equal(engine.score(TEXT.tolist()), cold)


@pytest.mark.parametrize("plan_name", ["channel_plan", "mixed_plan"])
def test_a_prefix_hit_equals_a_cold_run(plan_name, request):
    prompt, params = TEXT.tolist(), SamplingParams(max_tokens=12, temperature=0, logprobs=5, ignore_eos=True)
    config = EngineConfig(prefix_cache=True)
    with Engine.load(request.getfixturevalue(plan_name), config) as engine:
        (cold,), (hit,) = engine.generate([prompt], params), engine.generate([prompt], params)
    assert hit.usage.cached_tokens >= 96 > cold.usage.cached_tokens
    assert hit.token_ids == cold.token_ids
    assert hit.logprobs == cold.logprobs


def test_block_counts_for_a_byte_budget(fp32_plan, channel_plan, mixed_plan):
    """Blocks of 16 slots, 3 layers of 2 heads of 16: keys and values, then 4 bytes a slot for each scale or minimum."""
    bytes_of = {
        "float32": 2 * 2 * 16 * 16 * 4,
        "int8": 2 * (2 * 16 * 16 + 16 * 4),
        "int4": 2 * (16 * 8 + 16 * 16 + 16 * 8),  # values are padded to 32 columns
    }
    budget = 1 << 20
    for path, block in (
        (fp32_plan, 3 * bytes_of["float32"]),
        (channel_plan, 3 * bytes_of["int8"]),
        (mixed_plan, bytes_of["float32"] + 2 * bytes_of["int4"]),
    ):
        with Plan.open(path) as plan, closing(load_executor(plan, kv_memory_bytes=budget, threads=1)) as executor:
            assert executor.pool.bytes_per_block == block
            assert executor.pool.num_blocks == budget // block


def test_the_decision_is_taken_from_the_cache_of_builds(build):
    first = build("kv-again", passes=kv_passes(keys="channel"), calibration=CALIBRATION, limits={"max_seq_len": 128})
    second = build("kv-again", passes=kv_passes(keys="channel"), calibration=CALIBRATION, limits={"max_seq_len": 64})
    assert second.manifest.passes[0].cached
    assert second.manifest.kv == first.manifest.kv
    with Plan.open(second.path) as plan:
        assert "kv/0/key_scales" in plan


@pytest.mark.parametrize(
    ("target", "passes", "words"),
    [
        ({}, kv_passes(dtype="fp8"), "tensorrt"),
        ({"backend": "onnxruntime"}, kv_passes(keys="token"), "use one of float32"),
        ({"kv_dtype": "int8"}, kv_passes(keys="token"), "leave out one of the two"),
        ({}, [{"kv_quant": {"keys": "token"}}, *kv_passes(keys="token")], r"passes\[0\] already"),
    ],
)
def test_what_a_target_cannot_hold_is_a_fault_of_the_recipe(build, target, passes, words):
    with pytest.raises(ConfigError, match=words):
        build("kv-refused", passes=passes, target=target)


def test_sequences_beyond_what_scales_of_channels_suit_are_refused_up_front(make_recipe, build, tmp_path):
    """Before weights are read: RoPE goes on turning keys, and fixed scales cut them off there."""
    limits = {"max_seq_len": 200, "max_step_tokens": 64, "max_seqs": 2, "kv_memory": "4MiB"}
    given = {"limits": limits, "calibration": {"samples": 2, "seq_len": 64}}
    for options in ({"positions": 100}, {"positions": 100, "keys": "channel"}):
        recipe = make_recipe(tmp_path / "short.yaml", passes=kv_passes(**options), **given)
        with pytest.raises(ConfigError, match=r"suit 100 positions, and sequences get 200 long; set positions: 200"):
            plan_build(recipe, BuildOptions(output=tmp_path / "short.plan"))
        with pytest.raises(ConfigError, match="suit 100 positions"):
            build("kv-short", passes=kv_passes(**options), **given)
    for options in ({"positions": 200}, {"positions": 100, "keys": "token"}, {}):
        plan_build(make_recipe(tmp_path / "long.yaml", passes=kv_passes(**options), **given), BuildOptions())


def test_layers_the_model_does_not_have_are_refused_before_any_pass_runs(build, monkeypatch):
    from optimc_passes.quantize.rtn import Rtn

    monkeypatch.setattr(Rtn, "run", lambda *_: pytest.fail("a pass ran"))
    passes = [{"rtn": {"group_size": 32}}, *kv_passes(skip_layers=[3, -1, 3], keys="token")]
    with pytest.raises(ConfigError, match=r"skip_layers: names -1, 3; the model has layers 0 to 2"):
        build("kv-beyond", passes=passes)


def test_models_longer_than_scales_suit_unless_told_are_refused_up_front(make_recipe, tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    given = {"model": str(folder), "calibration": CALIBRATION, "limits": {}}
    with pytest.raises(ConfigError, match=r"suit 8192 positions, and sequences get 32768 long"):
        plan_build(make_recipe(tmp_path / "r.yaml", passes=kv_passes(), **given), BuildOptions())


def test_uncalibrated_scales_are_said_wherever_the_plan_is_looked_at(build, cli):
    built = build("kv-uncalibrated", passes=kv_passes(keys="channel", allow_uncalibrated=True))
    assert built.manifest.kv.is_uncalibrated
    shown = " ".join(cli("inspect", built.path, env={"COLUMNS": "200"}).stdout.split())
    assert "int8; keys per channel in all layers, uncalibrated" in shown
    layers = cli("inspect", built.path, "--layers").stdout
    assert "layers.0.kv" in layers
    assert "keys per channel: uncalibrated" in layers


def test_formats_chosen_with_the_weights_are_served(build):
    """`auto_bits` spends 6 bits a number over three layers; `kv_quant` gives the keys their scales."""
    auto_bits = {"average_bits": 5, "group_sizes": [32], "kv": {"dtypes": ["int8", "int4"], "average_bits": 6}}
    rtn = {"bits": "auto", "group_size": 32}
    passes = [{"auto_bits": auto_bits}, {"rtn": rtn}, *kv_passes(dtype="auto", keys="channel")]
    built = build("kv-auto", passes=passes, calibration={"samples": 4, "seq_len": 64})
    kv = built.manifest.kv
    assert sorted(map(kv.dtype_of, range(3))) == ["int4", "int4", "int8"]
    assert {layer.keys for layer in kv.layers} == {"channel"}
    assert [layer.key_minimums is not None for layer in kv.layers] == [kv.dtype_of(i) == "int4" for i in range(3)]
    assert np.isfinite(score(built.path)).all()


def test_a_server_says_that_its_cache_is_uncalibrated(build, channel_plan):
    uncalibrated = build("kv-uncalibrated", passes=kv_passes(keys="channel", allow_uncalibrated=True)).path
    for path, expected in ((uncalibrated, True), (channel_plan, False)):
        command = [sys.executable, "-m", "optimc", "serve", str(path), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            said = []
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                if " ready on " in line:
                    break
            process.kill()
        assert " ready on " in said[-1]
        assert any("uncalibrated" in line for line in said) == expected


def test_native_and_python_know_the_same_formats():
    for dtype in ("float32", "bfloat16", "int8", "int4"):
        assert _native.kv_block_bytes(layers=[(1, 8, dtype, "token")], block_size=1) > 0
