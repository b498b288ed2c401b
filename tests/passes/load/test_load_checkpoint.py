import re
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.load import load_config


def assert_holds(checkpoint, model) -> None:
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert set(checkpoint.weights) == set(expected)
    for name, weight in checkpoint.weights.items():
        array = weight.read()
        assert array.dtype == weight.dtype
        assert array.shape == weight.shape
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


def change_tensors(path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_single_file_holds_every_parameter_once(folder, load, model):
    assert_holds(load(folder), model)


def test_sharded_equals_single(sharded, load, model):
    assert_holds(load(sharded), model)


def test_everything_else_is_read(folder, load):
    checkpoint = load(folder)
    assert (checkpoint.bos, checkpoint.eos, checkpoint.pad) == (0, (1,), 2)
    assert checkpoint.tokenizer.special_tokens == {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
    }
    assert checkpoint.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert checkpoint.config.num_hidden_layers == 3
    assert checkpoint.config.tie_word_embeddings is False
    assert checkpoint.notes == ()
    assert checkpoint.source == str(folder)


def test_a_string_path_is_a_path(folder, load, model):
    assert_holds(load(str(folder)), model)


def test_bias_free_model_has_no_bias(folder, load):
    assert not [name for name in load(folder).weights if name.endswith("bias")]


def test_biases_are_read(tools, tmp_path, load):
    model = tools.model(tools.config(attention_bias=True, mlp_bias=True))
    model.save_pretrained(tmp_path / "biased")
    checkpoint = load(tmp_path / "biased")
    assert_holds(checkpoint, model)
    assert len([name for name in checkpoint.weights if name.endswith("bias")]) == 3 * 7


def test_head_dim_of_the_config_is_honoured(tools, tmp_path, load):
    model = tools.model(tools.config(head_dim=24))
    model.save_pretrained(tmp_path / "wide")
    checkpoint = load(tmp_path / "wide")
    assert checkpoint.weights["model.layers.0.self_attn.q_proj.weight"].shape == (96, 64)
    assert_holds(checkpoint, model)


def test_bf16_stays_bf16(tools, tmp_path, load):
    model = tools.model(tools.config()).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    checkpoint = load(tmp_path / "bf16")
    for name, weight in checkpoint.weights.items():
        assert weight.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            weight.read().astype(np.float32), model.state_dict()[name].to(torch.float32).numpy()
        )


def test_reading_is_lazy(folder, load):
    weight = load(folder).weights["model.embed_tokens.weight"]
    assert weight.read() is not weight.read()
    assert not weight.read().flags.owndata
    assert not weight.read().flags.writeable
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="embed_tokens.weight can no longer be read"):
        weight.read()


# Tied heads.


def test_tied_head_without_tensor_appears_once(tools, tmp_path, load):
    tools.model(tools.config(tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    checkpoint = load(tmp_path / "tied")
    assert checkpoint.config.tie_word_embeddings is True
    assert "lm_head.weight" not in checkpoint.weights
    assert "model.embed_tokens.weight" in checkpoint.weights


def test_tied_flag_with_equal_head_is_tied(folder, load, tools):
    tools.edit_json(folder / "config.json", tie_word_embeddings=True)
    change_tensors(
        folder / "model.safetensors", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    checkpoint = load(folder)
    assert checkpoint.config.tie_word_embeddings is True
    assert "lm_head.weight" not in checkpoint.weights


def test_tied_flag_with_other_head_is_untied_and_says_so(folder, load, tools, model):
    tools.edit_json(folder / "config.json", tie_word_embeddings=True)
    checkpoint = load(folder)
    assert checkpoint.config.tie_word_embeddings is False
    assert_holds(checkpoint, model)
    assert any("their values differ" in note for note in checkpoint.notes)


def test_tied_flag_with_only_the_head_fills_the_embedding(folder, load, tools, model):
    tools.edit_json(folder / "config.json", tie_word_embeddings=True)
    change_tensors(folder / "model.safetensors", lambda t: t.pop("model.embed_tokens.weight"))
    checkpoint = load(folder)
    assert "lm_head.weight" not in checkpoint.weights
    np.testing.assert_array_equal(
        checkpoint.weights["model.embed_tokens.weight"].read(), model.lm_head.weight.detach().numpy()
    )


def test_untied_without_head_is_refused_by_name(folder, load):
    change_tensors(folder / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight; set tie_word_embeddings"):
        load(folder)


# Missing, surplus, wrong.


def test_missing_tensor_is_named(folder, load):
    change_tensors(folder / "model.safetensors", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 parameter has no tensor: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_surplus_tensor_is_named(folder, load):
    change_tensors(folder / "model.safetensors", lambda t: t.update({"model.layers.0.extra": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"no place in the model: model\.layers\.0\.extra"):
        load(folder)


def test_wrong_shape_is_named_with_both_shapes(folder, load):
    change_tensors(folder / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(CheckpointError, match=re.escape("model.norm.weight is [65], the configuration makes it [64]")):
        load(folder)


def test_wrong_dtype_is_named(folder, load):
    change_tensors(
        folder / "model.safetensors", lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8, readable are F32"):
        load(folder)


def test_recomputed_rotary_tables_are_skipped_with_a_note(folder, load, model):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder / "model.safetensors", lambda t: t.update({name: torch.ones(8)}))
    checkpoint = load(folder)
    assert_holds(checkpoint, model)
    assert any(name in note for note in checkpoint.notes)


def test_keys_without_base_prefix_are_accepted(folder, load, model):
    def strip(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(folder / "model.safetensors", strip)
    assert_holds(load(folder), model)


def test_two_tensors_for_one_parameter_are_refused(folder, load):
    change_tensors(folder / "model.safetensors", lambda t: t.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(CheckpointError, match=r"both .*norm\.weight and .*norm\.weight would fill model\.norm\.weight"):
        load(folder)


# Order of work.


def test_unsupported_model_is_refused_before_weights(folder, load, tools):
    (folder / "model.safetensors").unlink()
    tools.edit_json(folder / "config.json", model_type="quux")
    begin = time.monotonic()
    with pytest.raises(UnsupportedModelError, match="model_type 'quux' is unknown to transformers"):
        load(folder)
    assert time.monotonic() - begin < 5


def test_check_config_runs_before_weights_are_opened(folder, load):
    (folder / "model.safetensors").unlink()

    def refuse(config):
        raise UnsupportedModelError(f"no {config.model_type} today")

    with pytest.raises(UnsupportedModelError, match="no llama today"):
        load(folder, check_config=refuse)


def test_load_config_needs_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert load_config(folder).hidden_size == 64


def test_impossible_geometry_is_refused(folder, load, tools):
    tools.edit_json(folder / "config.json", num_attention_heads=5, head_dim=None)
    with pytest.raises(CheckpointError, match="not a multiple"):
        load(folder)


# Identity.


def test_digest_depends_on_every_input_and_not_on_the_place(folder, load, tmp_path, tools):
    before = load(folder).digest
    moved = folder.rename(tmp_path / "elsewhere")
    assert load(moved).digest == before
    seen = {before}
    for change in (
        lambda: tools.edit_json(moved / "config.json", rms_norm_eps=1e-5),
        lambda: tools.edit_json(moved / "tokenizer_config.json", chat_template="other"),
        lambda: tools.edit_json(moved / "generation_config.json", temperature=0.5, do_sample=True),
        lambda: change_tensors(moved / "model.safetensors", lambda t: t["model.norm.weight"].add_(1)),
    ):
        change()
        seen.add(load(moved).digest)
    assert len(seen) == 5


def test_unreferenced_files_do_not_change_the_digest(sharded, load):
    before = load(sharded).digest
    save_file({"x": torch.ones(2)}, sharded / "consolidated.safetensors")
    (sharded / "README.md").write_text("hello")
    assert load(sharded).digest == before


def test_side_files_may_be_absent(folder, load):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    checkpoint = load(folder)
    assert checkpoint.tokenizer.tokenizer_json is None
    assert checkpoint.tokenizer.chat_template is None
    assert checkpoint.eos == (1,)
    assert any("only token ids can be served" in note for note in checkpoint.notes)


def test_eos_is_the_union_of_three_files(folder, load, tools):
    tools.edit_json(folder / "config.json", eos_token_id=[7, 5])
    tools.edit_json(folder / "generation_config.json", eos_token_id=[9, 7])
    assert load(folder).eos == (1, 5, 7, 9)


def test_tokens_beyond_the_embedding_are_noted(folder, load, tools):
    tokenizer = tools.tokenizer()
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|extra{number}|>" for number in range(first, 386)])
    tokenizer.save(str(folder / "tokenizer.json"))
    note = 'the tokenizer knows 2 tokens beyond the 384 rows of the embedding ("<|extra384|>", "<|extra385|>")'
    assert load(folder).notes == (note,)
