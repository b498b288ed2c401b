import numpy as np
import pytest

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.formats.gptq import choose_version, pack_layer
from optimc_passes.formats.scheme import narrow_scales
from optimc_passes.weights import Dense, Quantized


def read_all(tensors):
    """Read lazily packed tensors, after checking that each is what it was declared to be."""
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape
        assert tensor.read().dtype == tensor.dtype
    return {part: tensor.read() for part, tensor in tensors.items()}


UP = "model.layers.0.mlp.up_proj"
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")


def config(bits=4, group=32, **changes):
    facts = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False}
    return facts | changes


def pack_all(folder, layer, unpack, bits=4, group=32, *, symmetric=False, version=1, shuffle=False):
    """Replace every linear layer; return the weights they stand for."""
    weights = {}
    for seed, (name, (outputs, columns)) in enumerate(folder.linears.items()):
        size = columns if group == -1 else group
        numbers = layer(outputs, columns, bits, size, symmetric=symmetric, seed=seed)
        if shuffle:
            numbers.shuffle(seed + 100)
        parts = unpack.pack_gptq(numbers.codes, numbers.scales, numbers.zeros, bits, numbers.g_idx, version=version)
        folder.put(name, parts)
        weights[name] = numbers.weight
    return weights


def assert_read(checkpoint, weights):
    for name, expected in weights.items():
        weight = checkpoint.weights[f"{name}.weight"]
        assert isinstance(weight, Quantized), name
        assert np.array_equal(weight.dequantize(), expected), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_reads_what_the_format_says(folder, layer, unpack, bits, version):
    weights = pack_all(folder, layer, unpack, bits, version=version)
    folder.config["quantization_config"] = config(bits, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    checkpoint = folder.load()
    assert_read(checkpoint, weights)
    assert checkpoint.weights[f"{UP}.weight"].bits == bits
    assert checkpoint.folder == folder.path
    assert not hasattr(checkpoint.config, "quantization_config")


def test_whole_rows_and_symmetric_layers(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack, group=-1, symmetric=True)
    folder.config["quantization_config"] = config(group=-1, sym=True)
    checkpoint = folder.load()
    assert_read(checkpoint, weights)
    assert checkpoint.weights[f"{UP}.weight"].symmetric
    assert checkpoint.weights[f"{UP}.weight"].group == 64


def test_a_ragged_last_group(make_folder, layer, unpack):
    folder = make_folder()
    weights = pack_all(folder, layer, unpack, group=48)
    folder.config["quantization_config"] = config(group=48)
    assert_read(folder.load(), weights)


def test_the_older_file_beside_the_configuration_is_enough(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    (folder.path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "sym": false, "desc_act": false}')
    assert_read(folder.load(), weights)


def test_two_descriptions_that_differ_are_refused(folder, layer, unpack):
    pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config()
    (folder.path / "quantize_config.json").write_text('{"bits": 4, "group_size": 64}')
    with pytest.raises(CheckpointError, match=r"group_size is 32 in config.json and 64 in quantize_config.json"):
        folder.load()


def test_act_order_is_read_as_a_permutation(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack, shuffle=True)
    folder.config["quantization_config"] = config(desc_act=True)
    checkpoint = folder.load()
    assert checkpoint.weights[f"{UP}.weight"].permutation is not None
    assert_read(checkpoint, weights)


def test_zero_points_of_zero_wrap_in_version_one(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    numbers = layer(160, 64, 4, 32, symmetric=False, seed=9)
    numbers.zeros[::3] = 0
    folder.put(UP, unpack.pack_gptq(numbers.codes, numbers.scales, numbers.zeros, 4))
    folder.config["quantization_config"] = config()
    checkpoint = folder.load()
    assert_read(checkpoint, weights | {UP: numbers.weight})
    assert any("zero points of 0" in note for note in checkpoint.notes)


def test_gptqmodel_takes_one_from_whole_words(folder, layer, unpack):
    """Its words borrow from the next zero point where one is 0; adding to whole words gives them back."""
    weights = pack_all(folder, layer, unpack, version=2)
    numbers = layer(160, 64, 4, 32, symmetric=False, seed=9)
    numbers.zeros[::3] = 0
    parts = unpack.pack_gptq(numbers.codes, numbers.scales, numbers.zeros, 4, version=2)
    folder.put(UP, parts)
    for name, array in folder.tensors.items():
        if name.endswith(".qzeros"):
            folder.tensors[name] = (array.view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    folder.config["quantization_config"] = config(checkpoint_format="gptq", meta={"quantizer": ["gptqmodel:7.7.0"]})
    assert_read(folder.load(), weights | {UP: numbers.weight})


def test_dynamic_rules_change_or_exclude_layers(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    numbers = layer(160, 64, 8, 16, symmetric=False, seed=9)
    folder.put(UP, unpack.pack_gptq(numbers.codes, numbers.scales, numbers.zeros, 8, numbers.g_idx))
    dense = np.ones((64, 160), np.float32)
    down = "model.layers.1.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del folder.tensors[f"{down}.{part}"]
    folder.tensors[f"{down}.weight"] = dense
    folder.config["quantization_config"] = config(
        dynamic={r"+:.*layers\.0\.mlp\.up_proj": {"bits": 8, "group_size": 16}, r"-:.*layers\.1\.mlp\.down.*": {}}
    )
    del weights[down]
    checkpoint = folder.load()
    assert_read(checkpoint, weights | {UP: numbers.weight})
    assert np.array_equal(checkpoint.weights[f"{down}.weight"].read(), dense)


def test_biases_that_a_writer_invented_are_dropped_if_they_are_zero(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config()
    folder.tensors[f"{UP}.bias"] = np.zeros(160, np.float16)
    checkpoint = folder.load()
    assert_read(checkpoint, weights)
    assert f"{UP}.bias" not in checkpoint.weights
    folder.tensors[f"{UP}.bias"] = np.ones(160, np.float16)
    with pytest.raises(CheckpointError, match=r"no place in the model: model.layers.0.mlp.up_proj.bias"):
        folder.load()


def test_biases_of_the_model_are_kept(make_folder, layer, unpack):
    folder = make_folder(attention_bias=True)
    bias = folder.tensors[f"{Q}.bias"]
    weights = pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config()
    folder.tensors[f"{K}.bias"] = np.zeros_like(folder.tensors[f"{K}.bias"])
    checkpoint = folder.load()
    assert_read(checkpoint, weights)
    assert np.array_equal(checkpoint.weights[f"{Q}.bias"].read(), bias)
    assert not checkpoint.weights[f"{K}.bias"].read().any()


def test_other_versions_and_widths_are_refused_by_name(folder, layer, unpack):
    pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config(checkpoint_format="marlin")
    with pytest.raises(UnsupportedModelError, match="checkpoint_format 'marlin' is not read"):
        folder.load()
    folder.config["quantization_config"] = config(bits=5)
    with pytest.raises(UnsupportedModelError, match="GPTQ with 5 bits"):
        folder.load()


def make_quantized(numbers, permutation=None):
    codes = numbers.codes.astype(np.uint8)
    return Quantized(
        codes=Dense.of(codes if permutation is None else codes[:, permutation]),
        scales=Dense.of(numbers.scales),
        zeros=Dense.of(numbers.zeros.astype(np.uint8)),
        bits=numbers.bits,
        group=numbers.group,
        permutation=None if permutation is None else Dense.of(permutation),
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
def test_writes_what_the_format_says(layer, unpack, bits, version):
    numbers = layer(32, 64, bits, 16, symmetric=False)
    tensors = read_all(pack_layer(make_quantized(numbers), "gptq" if version == 1 else "gptq_v2"))
    assert np.array_equal(unpack.unpack_gptq(tensors, bits, 64, version=version), numbers.weight)
    assert tensors["scales"].dtype == np.float16


def test_writes_permutations_as_group_indices(layer, unpack):
    numbers = layer(32, 64, 4, 16, symmetric=False).shuffle(3)
    permutation = np.argsort(numbers.g_idx, kind="stable").astype(np.int32)
    # Within a group the order of columns is free: the format does not keep it.
    permutation[:16] = permutation[:16][::-1]
    tensors = read_all(pack_layer(make_quantized(numbers, permutation), "gptq"))
    assert np.array_equal(tensors["g_idx"], numbers.g_idx)
    assert np.array_equal(unpack.unpack_gptq(tensors, 4, 64), numbers.weight)


def test_version_two_where_zero_points_differ():
    assert choose_version(symmetric=True) == "gptq"
    assert choose_version(symmetric=False) == "gptq_v2"


def test_scales_that_float16_does_not_hold_stay_float32():
    fits, wide = np.array([[0.5, 0.25]], np.float32), np.array([[0.1, 1e-9]], np.float32)
    assert narrow_scales(fits).dtype == np.float16
    assert narrow_scales(wide).dtype == np.float32
    assert narrow_scales(np.array([[1e6]], np.float32)).dtype == np.float32
