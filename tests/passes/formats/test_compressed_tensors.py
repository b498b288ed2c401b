import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.naive_quantized import IntQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import save_file

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.formats.compressed_tensors import int8_layer, pack_layer
from optimc_passes.weights import Dense, Quantized


def read_all(tensors):
    """Read lazily packed tensors, after checking that each is what it was declared to be."""
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape
        assert tensor.read().dtype == tensor.dtype
    return {part: tensor.read() for part, tensor in tensors.items()}


UP = "model.layers.0.mlp.up_proj"


def weights_of(bits=4, group=32, *, symmetric=False, **changes):
    facts = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
    if group == -1:
        facts |= {"strategy": "channel", "group_size": None}
    return facts | changes


def config(weights, format_="pack-quantized", **changes):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": changes.pop("input_activations", None)}
    facts = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return facts | changes


def pack_all(folder, layer, unpack, bits=4, group=32, *, symmetric=False):
    weights = {}
    for seed, (name, (outputs, columns)) in enumerate(folder.linears.items()):
        numbers = layer(outputs, columns, bits, columns if group == -1 else group, symmetric=symmetric, seed=seed)
        zeros = None if symmetric else numbers.zeros
        folder.put(name, unpack.pack_compressed(numbers.codes, numbers.scales, zeros, bits))
        weights[name] = numbers.weight
    return weights


def assert_read(checkpoint, weights):
    for name, expected in weights.items():
        weight = checkpoint.weights[f"{name}.weight"]
        assert isinstance(weight, Quantized), name
        assert np.array_equal(weight.dequantize(), expected), name


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "symmetric"), [(16, False), (32, True), (-1, False), (-1, True)])
def test_reads_packed_integers(folder, layer, unpack, bits, group, symmetric):
    weights = pack_all(folder, layer, unpack, bits, group, symmetric=symmetric)
    folder.config["quantization_config"] = config(weights_of(bits, group, symmetric=symmetric))
    assert_read(folder.load(), weights)


def test_reads_zero_points_that_are_not_packed(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    for name, array in list(folder.tensors.items()):
        if name.endswith("weight_zero_point"):
            outputs = folder.tensors[name.replace("weight_zero_point", "weight_shape")][0]
            columns = [unpack.codes_of(array[:, g], 4, int(outputs)) for g in range(array.shape[1])]
            folder.tensors[name] = (np.array(columns).T - 8).astype(np.int8)
    folder.config["quantization_config"] = config(weights_of())
    assert_read(folder.load(), weights)


def test_the_older_key_is_read(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    facts = config(weights_of())
    del facts["quant_method"]
    folder.config["compression_config"] = facts
    assert_read(folder.load(), weights)


def test_act_order_is_read_as_a_permutation(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    numbers = layer(160, 64, 4, 32, symmetric=False, seed=9).shuffle(7)
    parts = unpack.pack_compressed(numbers.codes, numbers.scales, numbers.zeros, 4)
    folder.put(UP, parts | {"weight_g_idx": numbers.g_idx.astype(np.int32)})
    folder.config["quantization_config"] = config(weights_of(actorder="group"))
    assert_read(folder.load(), weights | {UP: numbers.weight})


def test_groups_of_layers_have_widths_of_their_own(folder, layer, unpack):
    weights = pack_all(folder, layer, unpack)
    numbers = layer(160, 64, 8, 64, symmetric=True, seed=9)
    for part in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point"):
        del folder.tensors[f"{UP}.{part}"]
    folder.put(UP, unpack.pack_compressed(numbers.codes, numbers.scales, None, 8))
    facts = config(weights_of())
    by_name = {"targets": [UP], "weights": weights_of(8, -1, symmetric=True)}
    facts["config_groups"] = {"wide": facts["config_groups"]["group_0"], "narrow": by_name}
    folder.config["quantization_config"] = facts
    assert_read(folder.load(), weights | {UP: numbers.weight})


@pytest.mark.parametrize("activations", [{"num_bits": 8, "dynamic": True, "strategy": "token"}, None])
def test_reads_plain_int8(folder, activations):
    weights = {}
    for seed, (name, (outputs, columns)) in enumerate(folder.linears.items()):
        generator = np.random.default_rng(seed)
        codes = generator.integers(-128, 128, (outputs, columns), dtype=np.int8)
        scales = generator.random((outputs, 1)).astype(np.float16)
        folder.put(name, {"weight": codes, "weight_scale": scales})
        weights[name] = codes.astype(np.float32) * scales.astype(np.float32)
    facts = config(weights_of(8, -1, symmetric=True), "int-quantized", input_activations=activations)
    folder.config["quantization_config"] = facts
    checkpoint = folder.load()
    assert_read(checkpoint, weights)
    assert checkpoint.weights[f"{UP}.weight"].activation_scale is None
    noted = any("target.activation_scales: row" in note for note in checkpoint.notes)
    assert noted == (activations is not None)


def test_static_scales_of_activations_are_kept(folder):
    for name, (outputs, columns) in folder.linears.items():
        parts = {"weight": np.ones((outputs, columns), np.int8), "weight_scale": np.ones((outputs, 1), np.float32)}
        folder.put(name, parts | {"input_scale": np.array([0.125], np.float32)})
    static = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
    facts = config(weights_of(8, -1, symmetric=True), "int-quantized", input_activations=static)
    folder.config["quantization_config"] = facts
    assert folder.load().weights[f"{UP}.weight"].activation_scale == 0.125
    del folder.tensors[f"{UP}.input_scale"]
    with pytest.raises(CheckpointError, match=r"up_proj: .*static scale, but there is no input_scale"):
        folder.load()


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_reads_fp8_as_the_numbers_it_stands_for(folder, strategy):
    block = [48, 32]
    weights = {}
    arrays = {name: torch.from_numpy(array.copy()) for name, array in folder.tensors.items()}
    for seed, (name, (outputs, columns)) in enumerate(folder.linears.items()):
        generator = np.random.default_rng(seed)
        values = generator.standard_normal((outputs, columns)).astype(ml_dtypes.float8_e4m3fn)
        grid = {"channel": (outputs, 1), "tensor": (1,), "block": (-(-outputs // 48), -(-columns // 32))}[strategy]
        scales = generator.random(grid).astype(np.float32)
        rows, cols = np.arange(outputs) // 48, np.arange(columns) // 32
        spread = scales[rows][:, cols] if strategy == "block" else scales
        weights[name] = values.astype(np.float32) * spread
        arrays[f"{name}.weight"] = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        arrays[f"{name}.weight_scale"] = torch.from_numpy(scales)
    described = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        described["block_structure"] = block
    folder.config["quantization_config"] = config(described, "float-quantized")
    folder.write()
    save_file(arrays, folder.path / "model.safetensors")
    from optimc_passes.load import load_checkpoint

    checkpoint = load_checkpoint(folder.path, cache_dir=folder.path / "cache")
    for name, expected in weights.items():
        weight = checkpoint.weights[f"{name}.weight"]
        assert isinstance(weight, Dense)
        assert np.array_equal(weight.read(), expected), name
    assert any("fp8" in note for note in checkpoint.notes)


def test_scales_of_a_quantized_cache_are_said_not_to_be_used(folder, layer, unpack):
    pack_all(folder, layer, unpack)
    folder.tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    folder.config["quantization_config"] = config(weights_of(), kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert any("1 scale for a quantized KV cache was not used" in note for note in folder.load().notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' of int weights is not read"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "stored sparse"),
        ({"transform_config": {"config_groups": {"R4": {}}}}, "asks for rotations of activations"),
    ],
)
def test_what_would_compute_something_else_is_refused(folder, layer, unpack, change, message):
    pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config(weights_of()) | change
    with pytest.raises(UnsupportedModelError, match=message):
        folder.load()


def make_quantized(numbers, *, symmetric):
    return Quantized(
        codes=Dense.of(numbers.codes.astype(np.uint8)),
        scales=Dense.of(numbers.scales),
        zeros=None if symmetric else Dense.of(numbers.zeros.astype(np.uint8)),
        bits=numbers.bits,
        group=numbers.group,
        activation_scale=0.5 if numbers.bits == 8 else None,
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("group", "symmetric"), [(16, False), (16, True), (64, False)])
def test_writes_what_the_format_and_the_public_package_say(layer, unpack, bits, group, symmetric):
    numbers = layer(24, 64, bits, group, symmetric=symmetric)
    tensors = read_all(pack_layer(make_quantized(numbers, symmetric=symmetric)))
    assert np.array_equal(unpack.unpack_compressed(tensors, bits), numbers.weight)
    size = -1 if group == 64 else group
    scheme = QuantizationScheme(targets=["Linear"], weights=weights_of(bits, size, symmetric=symmetric))
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()}
    # In float32: the package multiplies in the dtype of the scales.
    state["weight_scale"] = state["weight_scale"].float()
    weight = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    assert np.array_equal(weight.numpy(), numbers.weight)


def test_reads_what_the_public_package_packs(folder):
    weights = {}
    described = weights_of(4, 32)
    scheme = QuantizationScheme(targets=["Linear"], weights=described)
    for name in list(folder.linears):
        source = torch.from_numpy(folder.tensors[f"{name}.weight"])
        grouped = source.reshape(source.shape[0], -1, 32)
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero = (torch.round(-low / scale).clamp(0, 15) - 8).to(torch.int8)
        state = {"weight": source, "weight_scale": scale, "weight_zero_point": zero}
        packed = PackedQuantizationCompressor.compress(state, scheme)
        restored = PackedQuantizationCompressor.decompress(dict(packed), scheme)["weight"]
        folder.put(name, {part: tensor.numpy() for part, tensor in packed.items()})
        weights[name] = restored.numpy()
    folder.config["quantization_config"] = config(described)
    assert_read(folder.load(), weights)


def test_plain_int8_is_what_the_public_package_says(layer, unpack):
    numbers = layer(24, 64, 8, 64, symmetric=True)
    tensors = read_all(int8_layer(make_quantized(numbers, symmetric=True)))
    assert tensors["input_scale"].tolist() == [0.5]
    assert np.array_equal(unpack.unpack_int8(tensors), numbers.weight)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights_of(8, -1, symmetric=True))
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    state["weight_scale"] = state["weight_scale"].float()
    weight = IntQuantizationCompressor.decompress(state, scheme)["weight"]
    assert np.array_equal(weight.numpy(), numbers.weight)
