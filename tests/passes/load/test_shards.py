import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimc.errors import CheckpointError
from optimc_passes.load.shards import INDEX_NAME, list_tensors, read_index


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder, change) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def assert_unchanged(folder, load, model) -> None:
    for name, weight in load(folder).weights.items():
        assert torch.equal(torch.from_numpy(weight.read().copy()), model.state_dict()[name]), name


def test_missing_shard_is_named(sharded, load):
    shards(sharded)[1].unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: missing; .* holds \d+ tensors"):
        load(sharded)


def test_truncated_shard_is_named(sharded, load):
    path = shards(sharded)[1]
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: truncated"):
        load(sharded)


@pytest.mark.parametrize("length", [0, 5, 40])
def test_shard_cut_inside_its_header_is_named(sharded, load, length):
    path = shards(sharded)[0]
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors: truncated or not"):
        load(sharded)


def test_extra_file_is_ignored(sharded, load, model):
    tensors = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    save_file(tensors, sharded / "consolidated.safetensors")
    assert_unchanged(sharded, load, model)


def test_index_wins_over_a_single_file(sharded, load, model):
    tensors = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    save_file(tensors, sharded / "model.safetensors")
    assert_unchanged(sharded, load, model)


def test_old_copy_in_the_wrong_shard_is_ignored(sharded, load, model):
    first, _, last = shards(sharded)
    tensors = load_file(last)
    moved = next(iter(load_file(first)))
    save_file({**tensors, moved: load_file(first)[moved] + 1}, last)
    assert_unchanged(sharded, load, model)


def test_index_of_another_casing_finds_its_file(sharded, load, model):
    edit_index(
        sharded, lambda names: names.update({key: name.replace("model", "Model") for key, name in names.items()})
    )
    assert_unchanged(sharded, load, model)
    assert any("differs in case only" in note for note in load(sharded).notes)


def test_tensor_absent_from_its_shard_is_named(sharded, load):
    path = shards(sharded)[2]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=rf"model-00003-of-00003\.safetensors: {name} should be in it"):
        load(sharded)


def test_tensor_the_index_does_not_assign_is_named(sharded, load):
    path = shards(sharded)[2]
    save_file({**load_file(path), "model.stray": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"00003\.safetensors: holds model\.stray, which the index assigns to no"):
        load(sharded)


def test_tensor_missing_from_the_index_is_named(sharded, load):
    edit_index(sharded, lambda names: names.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight, which the index assigns to no file"):
        load(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors"])
def test_index_cannot_point_outside(sharded, name):
    edit_index(sharded, lambda names: names.update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_index(sharded / INDEX_NAME)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index_is_refused(sharded, text):
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match="holds no weight_map"):
        list_tensors(sharded)


def test_one_file_of_any_name_is_enough(folder, load, model):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert_unchanged(folder, load, model)


def test_standard_name_wins_without_an_index(folder, load, model):
    save_file({"x": torch.ones(2)}, folder / "consolidated.safetensors")
    assert_unchanged(folder, load, model)


def test_several_files_without_an_index_are_ambiguous(sharded, load):
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*no model\.safetensors\.index\.json"):
        load(sharded)


def test_no_weights_at_all(folder, load):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights, neither model\.safetensors nor"):
        load(folder)


def test_pickled_weights_are_named_not_read(folder, load):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read, convert it to safetensors"):
        load(folder)
