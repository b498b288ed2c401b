import numpy as np
import pytest

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.formats.awq import pack_layer
from optimc_passes.weights import Dense, Quantized


def read_all(tensors):
    """Read lazily packed tensors, after checking that each is what it was declared to be."""
    for tensor in tensors.values():
        assert tensor.read().shape == tensor.shape
        assert tensor.read().dtype == tensor.dtype
    return {part: tensor.read() for part, tensor in tensors.items()}


DOWN = "model.layers.1.mlp.down_proj"


def config(group=32, **changes):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | changes


def pack_all(folder, layer, unpack, group=32, *, symmetric=False):
    weights = {}
    for seed, (name, (outputs, columns)) in enumerate(folder.linears.items()):
        size = columns if group == -1 else group
        numbers = layer(outputs, columns, 4, size, symmetric=symmetric, seed=seed)
        folder.put(name, unpack.pack_awq(numbers.codes, numbers.scales, numbers.zeros))
        weights[name] = numbers.weight
    return weights


@pytest.mark.parametrize("group", [16, 32, -1])
@pytest.mark.parametrize("key", ["version", "format", "checkpoint_format"])
def test_reads_what_the_format_says(folder, layer, unpack, group, key):
    weights = pack_all(folder, layer, unpack, group)
    facts = config(group)
    facts[key] = facts.pop("version").upper()
    folder.config["quantization_config"] = facts
    checkpoint = folder.load()
    for name, expected in weights.items():
        weight = checkpoint.weights[f"{name}.weight"]
        assert isinstance(weight, Quantized)
        assert np.array_equal(weight.dequantize(), expected), name
    assert isinstance(checkpoint.weights["lm_head.weight"], Dense)


def test_no_zero_points_means_eight(folder, layer, unpack):
    pack_all(folder, layer, unpack, symmetric=True)
    folder.config["quantization_config"] = config(zero_point=False)
    assert folder.load().weights[f"{DOWN}.weight"].symmetric


def test_zero_points_against_the_tag_are_refused(folder, layer, unpack):
    pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config(zero_point=False)
    with pytest.raises(CheckpointError, match=r"zero_point: false, but \d+ zero points are not 8"):
        folder.load()


def test_layers_not_converted_stay_dense(folder, layer, unpack):
    dense = folder.tensors[f"{DOWN}.weight"]
    pack_all(folder, layer, unpack)
    for part in ("qweight", "qzeros", "scales"):
        del folder.tensors[f"{DOWN}.{part}"]
    folder.tensors[f"{DOWN}.weight"] = dense
    folder.config["quantization_config"] = config(modules_to_not_convert=["layers.1.mlp.down_proj"])
    assert np.array_equal(folder.load().weights[f"{DOWN}.weight"].read(), dense)


def test_other_layouts_and_widths_are_refused_by_name(folder, layer, unpack):
    pack_all(folder, layer, unpack)
    folder.config["quantization_config"] = config(version="gemv")
    with pytest.raises(UnsupportedModelError, match="AWQ in the layout 'gemv' is not read; readable is gemm"):
        folder.load()
    folder.config["quantization_config"] = config(bits=3)
    with pytest.raises(UnsupportedModelError, match="AWQ with 3 bits"):
        folder.load()


@pytest.mark.parametrize("symmetric", [True, False])
def test_writes_what_the_format_says(layer, unpack, symmetric):
    numbers = layer(24, 64, 4, 16, symmetric=symmetric)
    weight = Quantized(
        codes=Dense.of(numbers.codes.astype(np.uint8)),
        scales=Dense.of(numbers.scales),
        zeros=None if symmetric else Dense.of(numbers.zeros.astype(np.uint8)),
        bits=4,
        group=16,
    )
    assert np.array_equal(unpack.unpack_awq(read_all(pack_layer(weight)), 64), numbers.weight)
