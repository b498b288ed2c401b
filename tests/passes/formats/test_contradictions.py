"""A description that says something else than the tensors: an error that names both, never a guess."""

import re

import numpy as np
import pytest

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.load import load_checkpoint

UP = "model.layers.0.mlp.up_proj"


def gptq(**changes):
    facts = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    return facts | changes


def compressed(**changes):
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    group = {"targets": changes.pop("targets", ["Linear"]), "weights": weights | changes.pop("weights", {})}
    facts = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return facts | {"config_groups": {"group_0": group}} | changes


@pytest.fixture
def as_gptq(folder, layer, unpack):
    """Every linear layer packed with 4 bits in groups of 32, with act-order in the first up_proj if it is shuffled."""
    for seed, (name, shape) in enumerate(folder.linears.items()):
        numbers = layer(*shape, 4, 32, symmetric=False, seed=seed)
        folder.put(name, unpack.pack_gptq(numbers.codes, numbers.scales, numbers.zeros, 4, numbers.g_idx))
    folder.config["quantization_config"] = gptq()
    return folder


@pytest.fixture
def as_compressed(folder, layer, unpack):
    for seed, (name, shape) in enumerate(folder.linears.items()):
        numbers = layer(*shape, 4, 32, symmetric=False, seed=seed)
        folder.put(name, unpack.pack_compressed(numbers.codes, numbers.scales, numbers.zeros, 4))
    folder.config["quantization_config"] = compressed()
    return folder


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (gptq(bits=8), r"q_proj: qweight is \[8, 64\], expected \[16, 64\] \(bits 8 in the configuration\)"),
        (gptq(group_size=16), r"q_proj: qzeros is \[2, 8\], expected \[4, 8\]"),
        (gptq(group_size=-1), r"q_proj: qzeros is \[2, 8\], expected \[1, 8\]"),
        (gptq(sym=True), r"q_proj: the configuration says sym: true, but \d+ zero points are not 8"),
        (gptq(dynamic={r"-:.*up_proj": {}}), r"layers.0.mlp.up_proj stays dense, says .* has .*up_proj.g_idx"),
        (gptq(lm_head=True), r"lm_head is quantized, says its description, but has a plain weight"),
        (gptq(bits="four"), r"config.json: bits must be an integer, got 'four'"),
        (gptq(group_size=0), r"group_size must be positive, or -1 for the whole row, got 0"),
        (gptq(dynamic={"(": {}}), r"dynamic: '\(' is not a regular expression"),
        (gptq(lm_head="no"), r"config.json: lm_head must be true or false, got 'no'"),
    ],
)
def test_gptq_tags_against_tensors(as_gptq, facts, message):
    as_gptq.config["quantization_config"] = facts
    with pytest.raises(CheckpointError, match=message):
        as_gptq.load()


def test_group_indices_against_desc_act(as_gptq):
    index = as_gptq.tensors[f"{UP}.g_idx"]
    index[[3, 40]] = index[[40, 3]]
    with pytest.raises(CheckpointError, match=r"desc_act: false, but g_idx puts column 3 into group 1 instead of 0"):
        as_gptq.load()


def test_group_indices_that_form_no_groups(as_gptq):
    as_gptq.config["quantization_config"] = gptq(desc_act=True)
    as_gptq.tensors[f"{UP}.g_idx"][3] = 1
    with pytest.raises(CheckpointError, match=r"up_proj: g_idx does not form groups of 32 columns"):
        as_gptq.load()


def test_scales_that_are_not_finite(as_gptq):
    as_gptq.tensors[f"{UP}.scales"][1, 7] = np.inf
    with pytest.raises(CheckpointError, match=r"up_proj: 1 of 320 scales in scales are not finite"):
        as_gptq.load()


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_part_that_is_missing(as_gptq, part):
    del as_gptq.tensors[f"{UP}.{part}"]
    with pytest.raises(CheckpointError, match=rf"up_proj: there is no {part}"):
        as_gptq.load()


def test_a_layer_that_was_not_packed(as_gptq):
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del as_gptq.tensors[f"{UP}.{part}"]
    as_gptq.tensors[f"{UP}.weight"] = np.ones((160, 64), np.float32)
    with pytest.raises(CheckpointError, match=r"up_proj is quantized, says its description, but has a plain weight"):
        as_gptq.load()


def test_a_layer_that_is_packed_and_plain(as_gptq):
    as_gptq.tensors[f"{UP}.weight"] = np.ones((160, 64), np.float32)
    with pytest.raises(CheckpointError, match=r"up_proj has both a plain weight and g_idx, qweight"):
        as_gptq.load()


def test_a_layer_that_is_missing_altogether(as_gptq):
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del as_gptq.tensors[f"{UP}.{part}"]
    with pytest.raises(CheckpointError, match=rf"1 parameter has no tensor: {UP}.weight"):
        as_gptq.load()


def test_a_tag_and_nothing_packed(folder):
    folder.config["quantization_config"] = compressed(ignore=["re:.*"])
    with pytest.raises(CheckpointError, match=r"\(compressed-tensors\), says config.json, but none is packed"):
        folder.load()


def test_packed_tensors_and_no_tag(as_gptq):
    del as_gptq.config["quantization_config"]
    with pytest.raises(CheckpointError, match=r"no place in the model: .*packed weights need a quantization_config"):
        as_gptq.load()


def test_a_quantized_embedding_is_refused_by_name(as_gptq):
    as_gptq.tensors["model.embed_tokens.qweight"] = np.zeros((8, 96), np.int32)
    with pytest.raises(CheckpointError, match=r"no place in the model: model.embed_tokens.qweight"):
        as_gptq.load()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (compressed(weights={"num_bits": 8}), r"q_proj: weight_packed is \[64, 8\], expected \[64, 16\] \(num_bits 8"),
        (compressed(weights={"group_size": 64}), r"q_proj: weight_scale is \[64, 2\], expected \[64, 1\]"),
        (compressed(weights={"symmetric": True}), r"symmetric: true, but weight_zero_point is not all 0"),
        (compressed(ignore=["re:.*up_proj"]), r"up_proj stays dense, says the description, but the checkpoint has"),
        (compressed(ignore=[]), r"lm_head is quantized, says its description, but has a plain weight"),
        (compressed(config_groups={}), r"config_groups says nothing about any layer"),
        (compressed(weights={"group_size": None}), r"group_size must be an integer, got None"),
        (compressed(ignore=5), r"config.json: ignore must be a list of names, got 5"),
        (compressed(ignore="lm_head"), r"config.json: ignore must be a list of names, got 'lm_head'"),
        (compressed(ignore=["lm_head", None]), r"config.json: ignore must be a list of names, got \['lm_head', None\]"),
        (compressed(ignore=["re:("]), r"config.json: ignore: '\(' is not a regular expression"),
        (compressed(targets=["re:("]), r"config_groups.group_0: targets: '\(' is not a regular expression"),
        (compressed(targets=[]), r"config_groups.group_0: targets names no layer"),
    ],
)
def test_compressed_tags_against_tensors(as_compressed, facts, message):
    as_compressed.config["quantization_config"] = facts
    with pytest.raises(CheckpointError, match=message):
        as_compressed.load()


def test_a_stated_shape_that_is_another(as_compressed):
    as_compressed.tensors[f"{UP}.weight_shape"][:] = (64, 160)
    with pytest.raises(CheckpointError, match=r"up_proj: weight_shape is \[64, 160\], the configuration makes it"):
        as_compressed.load()


@pytest.mark.parametrize("stated", [[160.0, np.nan], [[160, 64]], 160])
def test_a_stated_shape_that_is_none(as_compressed, stated):
    as_compressed.tensors[f"{UP}.weight_shape"] = np.array(stated)
    with pytest.raises(CheckpointError, match=r"up_proj: weight_shape is .*, expected"):
        as_compressed.load()


@pytest.mark.parametrize("packed", ["as_gptq", "as_compressed"])
def test_packed_codes_and_plain_ones_of_8_bits(packed, request):
    """Either could be the layer; the plain ones alone would be those of int-quantized."""
    folder = request.getfixturevalue(packed)
    folder.tensors[f"{UP}.weight"] = np.ones((160, 64), np.int8)
    with pytest.raises(CheckpointError, match=r"up_proj has both a plain weight and .*(qweight|weight_packed)"):
        folder.load()


@pytest.mark.parametrize("value", [5, "lm_head", [5]])
def test_layers_not_to_convert_that_are_no_list(folder, value):
    folder.config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": value,
    }
    with pytest.raises(CheckpointError, match=r"config.json: modules_to_not_convert must be a list of names, got"):
        folder.load()


def test_a_type_of_weights_nothing_reads(as_compressed):
    as_compressed.config["quantization_config"] = compressed(weights={"type": "bits"})
    with pytest.raises(UnsupportedModelError, match=r"group_0: weights of type 'bits' are not read"):
        as_compressed.load()


def test_a_part_of_a_dtype_nothing_reads(as_compressed):
    """Of a layer whose zero points are only asked whether they are all 0."""
    as_compressed.config["quantization_config"] = compressed(weights={"symmetric": True})
    path = as_compressed.write() / "model.safetensors"
    path.write_bytes(re.sub(rb'(weight_zero_point":\{"dtype":)"I32"', rb'\1"F4 "', path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"weight_zero_point is F4 , readable are"):
        load_checkpoint(as_compressed.path, cache_dir=as_compressed.path / "cache")


def test_activations_the_layers_were_made_for_are_told_from_others(as_compressed):
    facts = compressed()
    facts["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "type": "int", "dynamic": True}
    as_compressed.config["quantization_config"] = facts
    assert "8-bit activations" not in " ".join(as_compressed.load().notes)
    as_compressed.tensors[f"{UP}.input_scale"] = np.ones(1, np.float32)
    assert "scales of activations were not used" in " ".join(as_compressed.load().notes)


def test_methods_nothing_reads_are_refused_by_name(folder):
    folder.config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UnsupportedModelError, match=r"\(bitsandbytes\), which cannot be read; readable are gptq, awq"):
        folder.load()
