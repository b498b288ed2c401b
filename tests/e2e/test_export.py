"""A recipe becomes a checkpoint folder that stands alone: for us, and for the tools whose format it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.numpy import load_file

from optimc.build import BuildOptions, build_recipe, export_recipe
from optimc.errors import ConfigError, PassError, UnknownNameError
from optimc_runtime.engine import Engine

FORMATS = ("gptq", "awq", "compressed-tensors")
RTN = {"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}
TOKENS = np.random.default_rng(3).integers(2, 380, 60)


def score(plan):
    with Engine.load(plan) as engine:
        return engine.score(TOKENS.tolist())


@pytest.fixture(scope="module")
def exported(make_recipe, cache_dir, tmp_path_factory):
    """The tiny model in each format, made from one recipe."""
    folder = tmp_path_factory.mktemp("exported")
    recipe = make_recipe(folder / "recipe.yaml", passes=[RTN, "fuse"], target={"int8_activations": False})
    options = BuildOptions(cache_dir=cache_dir)
    return {name: export_recipe(recipe, name, folder / name, options) for name in FORMATS}


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_folder_alone_is_the_model(exported, format_name, make_recipe, cache_dir, tmp_path, tiny_folder, build):
    """Quantized from a copy of the source that is gone before the folder is built and served."""
    source = shutil.copytree(tiny_folder, tmp_path / "source")
    first = make_recipe(tmp_path / "first.yaml", model=str(source), passes=[RTN], target={"int8_activations": False})
    result = export_recipe(first, format_name, tmp_path / "out", BuildOptions(cache_dir=cache_dir))
    shutil.rmtree(source)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    again = make_recipe(
        tmp_path / "again.yaml", model=str(result.folder), passes=["fuse"], target={"int8_activations": False}
    )
    plan = build_recipe(again, BuildOptions(output=tmp_path / "again.plan", cache_dir=cache_dir)).path
    in_memory = build("export-direct", passes=[RTN, "fuse"], target={"int8_activations": False}).path
    logits, expected = score(plan), score(in_memory)
    # The same codes and scales in the same kernels: bit for bit.
    assert np.array_equal(logits, expected)
    tensors = load_file(result.folder / "model.safetensors")
    packed = sum(array.nbytes for name, array in tensors.items() if "_proj." in name)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (160, 64), (160, 64), (64, 160)]
    assert packed < 0.45 * 2 * sum(3 * rows * columns for rows, columns in shapes)
    assert not [name for name in tensors if name.endswith("_proj.weight")]


@pytest.mark.slow
@pytest.mark.model
def test_linears_take_less_than_a_third_of_float16(smollm2, cache_dir, tmp_path):
    """At real sizes: four bits, a scale and a zero point for each group of 64."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: small\nmodel: {smollm2}\npasses:\n  - rtn: {{bits: 4, group_size: 64, symmetric: false}}\n"
        "limits: {max_seq_len: 512}\n"
    )
    result = export_recipe(recipe, "compressed-tensors", tmp_path / "out", BuildOptions(cache_dir=cache_dir))
    assert result.num_layers == 210
    assert result.linear_bytes < 0.3 * 2 * 106_168_320
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        export_recipe(recipe, "compressed-tensors", tmp_path / "out", BuildOptions(cache_dir=cache_dir))


def test_the_public_package_reads_the_folder(exported):
    folder = exported["compressed-tensors"].folder
    facts = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate({key: value for key, value in facts.items() if key != "quant_method"})
    scheme = config.config_groups["group_0"]
    layer = "model.layers.0.mlp.down_proj"
    tensors = load_file(folder / "model.safetensors")
    state = {name.rpartition(".")[2]: torch.from_numpy(a) for name, a in tensors.items() if name.startswith(layer)}
    state["weight_scale"] = state["weight_scale"].float()
    theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"].numpy()
    from optimc_passes.load import load_checkpoint

    ours = load_checkpoint(folder, cache_dir=folder.parent / "cache").weights[f"{layer}.weight"].dequantize()
    assert np.array_equal(theirs, ours)
    assert facts["ignore"] == ["lm_head"]


def test_transformers_loads_the_folder_through_the_public_package(make_recipe, cache_dir, tmp_path):
    """Symmetric: of packed zero points transformers 5.24 expects another shape than the package itself packs."""
    from transformers import AutoModelForCausalLM

    rtn = {"rtn": {"bits": 4, "group_size": 32, "symmetric": True}}
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[rtn])
    folder = export_recipe(recipe, "compressed-tensors", tmp_path / "out", BuildOptions(cache_dir=cache_dir)).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(TOKENS)[None]).logits[0].float().numpy()
    from optimc.measure.reference import TransformersReference
    from optimc_passes.load import load_checkpoint

    expected = TransformersReference(load_checkpoint(folder, cache_dir=folder.parent / "cache")).logits(TOKENS)
    # It multiplies codes and scales in float16.
    assert np.abs(logits - expected).max() < 2e-3 * np.abs(expected).max()


def test_shapes_a_format_cannot_hold_are_named_before_any_pass_runs(make_recipe, tmp_path, monkeypatch):
    from optimc_passes.quantize.rtn import Rtn

    monkeypatch.setattr(Rtn, "run", lambda *_: pytest.fail("a pass ran"))
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[{"rtn": {"bits": 4, "group_size": 48, "ragged": "ragged"}}])
    with pytest.raises(ConfigError) as caught:
        export_recipe(recipe, "awq", tmp_path / "out", BuildOptions(cache_dir=tmp_path / "cache"))
    assert "needs groups that divide the inputs" in str(caught.value)
    assert "16 more" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_rounded_embedding_is_refused_before_any_pass_runs(make_recipe, tmp_path, monkeypatch, format_name):
    from optimc_passes.quantize.rtn import Rtn

    monkeypatch.setattr(Rtn, "run", lambda *_: pytest.fail("a pass ran"))
    table = {"rtn": {"bits": 8, "group_size": 32, "only": ["embedding"]}}
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[RTN, table])
    with pytest.raises(ConfigError) as caught:
        export_recipe(recipe, format_name, tmp_path / "out", BuildOptions(cache_dir=tmp_path / "cache"))
    assert f"embed_tokens (384 × 64, group 32, 8 bits): {format_name} holds linear layers only" in str(caught.value)


def test_nothing_quantized_is_refused(make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=["fuse"])
    with pytest.raises(ConfigError, match="no layer is quantized"):
        export_recipe(recipe, "gptq", tmp_path / "out", BuildOptions(cache_dir=cache_dir))


@pytest.mark.parametrize(
    "passes",
    [
        [{"awq": {"rounding": "later"}}],
        [{"kv_quant": {"keys": "token"}}],
        [{"auto_bits": {"average_bits": 4}}, {"smoothquant": {"activations": "token", "rounding": "later"}}],
    ],
)
def test_passes_that_leave_rounding_to_others_are_refused_before_they_run(make_recipe, tmp_path, monkeypatch, passes):
    monkeypatch.setattr("optimc.build.export.load_calibration", lambda *_: pytest.fail("text was read"))
    given = {"passes": passes, "target": {"activation_scales": "row"}, "calibration": {"samples": 2, "seq_len": 16}}
    recipe = make_recipe(tmp_path / "recipe.yaml", **given)
    with pytest.raises(ConfigError, match="no layer is quantized"):
        export_recipe(recipe, "gptq", tmp_path / "out", BuildOptions(cache_dir=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", [".", "x" * 300])
def test_folders_that_cannot_be_made_are_refused_before_any_pass_runs(make_recipe, tmp_path, monkeypatch, name):
    from optimc_passes.quantize.rtn import Rtn

    monkeypatch.setattr(Rtn, "run", lambda *_: pytest.fail("a pass ran"))
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[RTN])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match="working directory|File name too long"):
        export_recipe(recipe, "gptq", Path(name), BuildOptions(cache_dir=tmp_path / "cache"))


def test_formats_nobody_knows_are_refused_by_name(make_recipe, tmp_path):
    with pytest.raises(UnknownNameError, match="unknown format 'gguf'; known: awq, compressed-tensors, gptq"):
        export_recipe(make_recipe(tmp_path / "recipe.yaml"), "gguf", tmp_path / "out")


def test_a_checkpoint_that_is_quantized_is_served_and_not_quantized_again(exported, make_recipe, cache_dir, tmp_path):
    model = str(exported["gptq"].folder)
    recipe = make_recipe(tmp_path / "recipe.yaml", model=model, passes=[RTN, "fuse"])
    with pytest.raises(PassError, match="quantized already"):
        build_recipe(recipe, BuildOptions(output=tmp_path / "x.plan", cache_dir=cache_dir))


def test_the_command_says_what_it_wrote_and_what_it_left_out(cli, make_recipe, tmp_path):
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[RTN, "fuse"])
    run = cli("export", recipe, "--format", "gptq", "-o", tmp_path / "out", "--json")
    assert run.returncode == 0, run.stderr
    facts = json.loads(run.stdout)
    assert facts["num_layers"] == 21
    assert "graph passes were not run" in " ".join(facts["notes"])
    assert (tmp_path / "out" / "config.json").is_file()
    again = cli("export", recipe, "--format", "gptq", "-o", tmp_path / "out")
    assert again.returncode == 2
    assert "exists and is not an empty folder" in again.stderr


def test_act_order_of_q_k_and_v_survives_fusion(tiny_folder, make_recipe, cache_dir, tmp_path):
    """Three orders of columns from a checkpoint: each layer keeps its own, fused or not."""
    from optimc_passes.formats.write import write_checkpoint
    from optimc_passes.load import load_checkpoint
    from optimc_passes.quantize.affine import quantize_affine
    from optimc_passes.weights import Dense, Quantized

    checkpoint = load_checkpoint(tiny_folder, cache_dir=cache_dir)
    weights = dict(checkpoint.weights)
    for seed, name in enumerate(name for name in weights if name.endswith("_proj.weight")):
        weight = weights[name].read()
        order = np.random.default_rng(seed).permutation(weight.shape[1]).astype(np.int32)
        codes, scales, zeros = quantize_affine(weight[:, order], 4, 32, symmetric=False)
        parts = Dense.of(codes), Dense.of(scales), Dense.of(zeros)
        weights[name] = Quantized(*parts, 4, 32, permutation=Dense.of(order))
    folder = write_checkpoint(checkpoint, weights, "gptq", tmp_path / "act-order").folder
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["desc_act"] is True
    logits = {}
    for name, passes in (("fused", ["fuse"]), ("plain", [])):
        recipe = make_recipe(
            tmp_path / f"{name}.yaml", model=str(folder), passes=passes, target={"int8_activations": False}
        )
        plan = build_recipe(recipe, BuildOptions(output=tmp_path / f"{name}.plan", cache_dir=cache_dir))
        logits[name] = score(plan.path)
        if name == "fused":
            [report] = [report for report in plan.manifest.passes if report.name == "merge_qkv"]
            assert report.fusion is not None
            assert report.fusion.declined, "three orders cannot be one product, and the report must say so"
    from optimc.measure.reference import TransformersReference

    expected = TransformersReference(load_checkpoint(folder, cache_dir=cache_dir)).logits(TOKENS)
    for name, actual in logits.items():
        assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max(), name


def test_a_fresh_export_leaves_nothing_in_the_cache_and_the_same_bytes(make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[RTN])
    kept = export_recipe(recipe, "gptq", tmp_path / "kept", BuildOptions(cache_dir=cache_dir))
    options = BuildOptions(cache_dir=tmp_path / "cache", fresh=True)
    fresh = export_recipe(recipe, "gptq", tmp_path / "fresh", options)
    assert not list((tmp_path / "cache").glob("weights/*"))
    for path in sorted(kept.folder.iterdir()):
        assert path.read_bytes() == (fresh.folder / path.name).read_bytes(), path.name


def test_memory_that_is_not_enough_is_refused_up_front(make_recipe, tmp_path):
    recipe = make_recipe(tmp_path / "recipe.yaml", passes=[RTN])
    options = BuildOptions(cache_dir=tmp_path / "cache", max_host_bytes=1 << 20)
    with pytest.raises(ConfigError, match="max-host-bytes"):
        export_recipe(recipe, "gptq", tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
