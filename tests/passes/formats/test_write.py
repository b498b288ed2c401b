import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from optimc.errors import CheckpointError, ConfigError
from optimc_passes.formats import write as module
from optimc_passes.formats.limits import LayerFacts, format_problems, group_of, nominal_group
from optimc_passes.formats.shard_writer import write_shards
from optimc_passes.formats.write import write_checkpoint
from optimc_passes.load import load_checkpoint
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.weights import Dense, Quantized

UP = "model.layers.0.mlp.up_proj"
FORMATS = ("gptq", "awq", "compressed-tensors")


def quantized(weight, bits=4, group=32, *, symmetric=False):
    group = weight.shape[1] if group == -1 else group
    codes, scales, zeros = quantize_affine(weight, bits, group, symmetric=symmetric)
    return Quantized(Dense.of(codes), Dense.of(scales), None if zeros is None else Dense.of(zeros), bits, group)


def quantize_all(checkpoint, bits=4, group=32, *, symmetric=False, head=False):
    """Return the checkpoint's weights with every linear layer of the decoder quantized, and the head if asked."""
    changed = {}
    for name, weight in checkpoint.weights.items():
        if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
            changed[name] = quantized(weight.read(), bits, group, symmetric=symmetric)
    return {**checkpoint.weights, **changed}


def reload(folder, tmp_path):
    return load_checkpoint(folder, cache_dir=tmp_path / "cache")


def parts_of(folder, layer):
    tensors = load_file(folder / "model.safetensors")
    return {name.rpartition(".")[2]: array for name, array in tensors.items() if name.rpartition(".")[0] == layer}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(("group", "symmetric"), [(32, False), (-1, True), (16, True)])
def test_the_folder_holds_what_was_given(folder, unpack, tmp_path, format_name, group, symmetric):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint, group=group, symmetric=symmetric)
    written = write_checkpoint(checkpoint, weights, format_name, tmp_path / "out")
    loaded = reload(written.folder, tmp_path)
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            assert isinstance(loaded.weights[name], Quantized)
            assert np.array_equal(loaded.weights[name].dequantize(), weight.dequantize()), name
        else:
            assert np.array_equal(loaded.weights[name].read(), weight.read()), name
    assert written.num_layers == 14
    parts = parts_of(written.folder, UP)
    version = 2 if "gptq_v2" in json.dumps(json.loads((written.folder / "config.json").read_text())) else 1
    independent = {
        "gptq": lambda: unpack.unpack_gptq(parts, 4, 64, version=version),
        "awq": lambda: unpack.unpack_awq(parts, 64),
        "compressed-tensors": lambda: unpack.unpack_compressed(parts, 4),
    }[format_name]()
    assert np.array_equal(independent, weights[f"{UP}.weight"].dequantize())


@pytest.mark.parametrize("group", [48, -1])
def test_export_load_dequantize_equals_memory_with_ragged_groups_and_whole_rows(folder, tmp_path, group):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint, group=group)
    written = write_checkpoint(checkpoint, weights, "gptq", tmp_path / "out")
    loaded = reload(written.folder, tmp_path)
    for name, weight in weights.items():
        if isinstance(weight, Quantized):
            assert np.array_equal(loaded.weights[name].dequantize(), weight.dequantize()), name
    assert any("last group is smaller" in note for note in written.notes) == (group == 48)


@pytest.mark.parametrize("format_name", ["gptq", "compressed-tensors"])
def test_layers_of_different_widths_are_described_one_by_one(folder, tmp_path, format_name):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint)
    weights[f"{UP}.weight"] = quantized(checkpoint.weights[f"{UP}.weight"].read(), 8, 16, symmetric=True)
    down = "model.layers.1.mlp.down_proj.weight"
    weights[down] = checkpoint.weights[down]
    folder_ = write_checkpoint(checkpoint, weights, format_name, tmp_path / "out").folder
    loaded = reload(folder_, tmp_path)
    assert (loaded.weights[f"{UP}.weight"].bits, loaded.weights[f"{UP}.weight"].group) == (8, 16)
    assert isinstance(loaded.weights[down], Dense)


def test_awq_refuses_different_widths(folder, tmp_path):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint)
    weights[f"{UP}.weight"] = quantized(checkpoint.weights[f"{UP}.weight"].read(), 8)
    with pytest.raises(ConfigError, match=r"up_proj \(160 × 64, group 32, 8 bits\): awq holds 4 bits only"):
        write_checkpoint(checkpoint, weights, "awq", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format_name", ["gptq", "compressed-tensors"])
def test_a_tied_head_that_was_quantized_is_a_head_of_its_own(make_folder, tmp_path, format_name):
    folder = make_folder(tie_word_embeddings=True)
    checkpoint = folder.load()
    embedding = checkpoint.weights["model.embed_tokens.weight"]
    weights = {**quantize_all(checkpoint), "lm_head.weight": quantized(embedding.read(), 8, 64, symmetric=True)}
    out = write_checkpoint(checkpoint, weights, format_name, tmp_path / "out").folder
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    loaded = reload(out, tmp_path)
    assert np.array_equal(loaded.weights["lm_head.weight"].dequantize(), weights["lm_head.weight"].dequantize())
    assert np.array_equal(loaded.weights["model.embed_tokens.weight"].read(), embedding.read())


@pytest.mark.parametrize(("symmetric", "version"), [(True, "gptq"), (False, "gptq_v2")])
def test_the_older_form_is_for_symmetric_layers(folder, tmp_path, symmetric, version):
    """GPTQModel reads other folders of that form only if it wrote them."""
    checkpoint = folder.load()
    written = write_checkpoint(checkpoint, quantize_all(checkpoint, symmetric=symmetric), "gptq", tmp_path / "out")
    facts = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    assert facts["checkpoint_format"] == version
    assert any("gptq_v2" in note for note in written.notes) != symmetric


def test_zero_points_of_zero_are_kept(folder, tmp_path):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint)
    old = weights[f"{UP}.weight"]
    zeros = old.zeros.read().copy()
    zeros[0, 0] = 0
    weights[f"{UP}.weight"] = Quantized(old.codes, old.scales, Dense.of(zeros), 4, 32)
    written = write_checkpoint(checkpoint, weights, "gptq", tmp_path / "out")
    assert np.array_equal(reload(written.folder, tmp_path).weights[f"{UP}.weight"].zeros.read(), zeros)


@pytest.mark.parametrize("scale", [None, 0.25])
def test_w8a8_is_plain_int8_with_its_activations(folder, tmp_path, scale):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint, 8, -1, symmetric=True)
    if scale is not None:
        weights = {
            name: module.Quantized(w.codes, w.scales, None, 8, w.group, activation_scale=scale)
            if isinstance(w, Quantized)
            else w
            for name, w in weights.items()
        }
    out = write_checkpoint(
        checkpoint, weights, "compressed-tensors", tmp_path / "out", per_token_activations=True
    ).folder
    facts = json.loads((out / "config.json").read_text())["quantization_config"]
    assert facts["format"] == "int-quantized"
    assert facts["config_groups"]["group_0"]["input_activations"]["dynamic"] is (scale is None)
    assert reload(out, tmp_path).weights[f"{UP}.weight"].activation_scale == scale


def test_the_other_files_come_along_and_ours_comes_last(folder, tmp_path):
    checkpoint = folder.load()
    (folder.path / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder.path / "chat_template.jinja").write_text("{{ messages }}")
    (folder.path / "quantize_config.json").write_text("{}")
    out = write_checkpoint(checkpoint, quantize_all(checkpoint), "awq", tmp_path / "out").folder
    assert (out / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert (out / "chat_template.jinja").is_file()
    assert not (out / "quantize_config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "cache"} - {"cache"}
    assert checkpoint.folder == folder.path


def test_what_reads_back_different_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    checkpoint = folder.load()
    monkeypatch.setattr(module, "_same", lambda first, second: False)
    with pytest.raises(CheckpointError, match=r"does not read back: .* differs; please report it"):
        write_checkpoint(checkpoint, quantize_all(checkpoint), "awq", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_same_weights_are_the_same_bytes(folder, tmp_path):
    checkpoint = folder.load()
    weights = quantize_all(checkpoint)
    first, second = (write_checkpoint(checkpoint, weights, "gptq", tmp_path / name).folder for name in ("one", "two"))
    for path in sorted(first.iterdir()):
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_shapes_a_format_cannot_hold_are_named():
    layers = [
        LayerFacts("q", (96, 96), 4, 32),
        LayerFacts("k", (12, 96), 4, 32),
        LayerFacts("down", (96, 200), 4, 64),
    ]
    [problem] = format_problems("gptq", layers)
    assert problem.startswith("k (12 × 96, group 32, 4 bits), down (96 × 200, group 64, 4 bits): gptq needs")
    narrow, ragged, group = format_problems("awq", layers)
    assert narrow.startswith("k (12 × 96, group 32, 4 bits): awq needs outputs")
    assert ragged.startswith("down (96 × 200, group 64, 4 bits): awq needs groups that divide")
    assert group.startswith("down (96 × 200, group 64, 4 bits): awq holds one group size")
    [ragged] = format_problems("compressed-tensors", layers)
    assert ragged.startswith("down (96 × 200, group 64, 4 bits): compressed-tensors needs groups that divide")


@pytest.mark.parametrize("format_name", ["awq", "compressed-tensors"])
def test_an_order_of_columns_is_written_as_gptq_only(format_name):
    layers = [LayerFacts("q", (96, 96), 4, 32, permuted=True)]
    [problem] = format_problems(format_name, layers)
    assert problem.endswith("order of columns; export as gptq")
    assert format_problems("gptq", layers) == []


def test_a_row_shorter_than_the_groups_of_others_is_one_group_of_theirs():
    layers = [LayerFacts("short", (8, 48), 4, 48), LayerFacts("long", (8, 128), 4, 64)]
    assert nominal_group(layers) == 64
    assert [group_of(layer, 64) for layer in layers] == [64, 64]
    rows = [LayerFacts("a", (8, 48), 4, 48), LayerFacts("b", (8, 128), 4, 128)]
    assert nominal_group(rows) == -1
    assert [group_of(layer, -1) for layer in rows] == [-1, -1]


def test_shards_are_read_back_in_order(tmp_path):
    tensors = {f"t{number}": Dense.of(np.full((number + 1, 5), number, np.float32)) for number in range(6)}
    total = write_shards(tensors, tmp_path, shard_bytes=120)
    assert total == sum(math.prod(tensor.shape) * 4 for tensor in tensors.values())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(tensors)
    assert len(set(index["weight_map"].values())) == 4
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / file)[name], tensors[name].read())
