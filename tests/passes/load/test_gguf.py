import json
import math

import gguf
import numpy as np
import pytest
import torch

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.load import gguf as module
from optimc_passes.load import load_config

REAL = "models/smollm2-135m-instruct.gguf"

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def gguf_name(name: str) -> str:
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves of each rotary pair beside each other."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture
def write(model, tools, tmp_path):
    """Write the tiny model as GGUF; return the path."""

    def make(name="tiny.gguf", metadata=None, tensors=None):
        config, path = model.config, tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(1e4)
        writer.add_vocab_size(config.vocab_size)
        for key, value in (metadata or {}).items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(key, value)
        facts = json.loads(tools.tokenizer().to_str())["model"]
        tokens = sorted(facts["vocab"], key=facts["vocab"].get)
        tokens += [f"<|free{number}|>" for number in range(len(tokens), config.vocab_size)]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in facts["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(2)
        writer.add_chat_template("{{ messages[0]['content'] }}")
        for parameter, tensor in model.state_dict().items():
            array = tensor.numpy()
            for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                array = interleave(array, heads) if part in parameter else array
            writer.add_tensor(gguf_name(parameter), array)
        for tensor_name, array in (tensors or {}).items():
            writer.add_tensor(tensor_name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def test_equals_the_model_it_was_written_from(write, load, model):
    checkpoint = load(write())
    assert set(checkpoint.weights) == set(model.state_dict())
    for name, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(weight.read(), model.state_dict()[name].numpy(), err_msg=name)
    assert (checkpoint.bos, checkpoint.eos, checkpoint.pad) == (0, (1,), 2)
    assert checkpoint.tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert checkpoint.tokenizer.special_tokens["eos_token"] == "<|eos|>"
    assert checkpoint.config.tie_word_embeddings is False
    assert checkpoint.config.rope_parameters["rope_theta"] == 1e4


def test_is_converted_once_and_found_by_content(write, load, monkeypatch, tmp_path, capfd):
    path = write()
    first = load(path)
    assert capfd.readouterr().err == ""
    (kept,) = (tmp_path / "cache" / "gguf").iterdir()
    monkeypatch.setattr(module, "_write_weights", None)
    moved = path.rename(tmp_path / "other-name.gguf")
    assert load(moved).digest == first.digest
    assert list(kept.parent.iterdir()) == [kept]


def test_losing_a_race_is_harmless(write, load, monkeypatch, tmp_path):
    path = write()
    expected = load(path).digest
    (kept,) = (tmp_path / "cache" / "gguf").iterdir()
    hidden = kept.rename(tmp_path / "hidden")
    write_tokenizer = module._write_tokenizer

    def finish_meanwhile(source, folder):
        write_tokenizer(source, folder)
        hidden.rename(kept)

    monkeypatch.setattr(module, "_write_tokenizer", finish_meanwhile)
    assert load(path).digest == expected
    assert list(kept.parent.iterdir()) == [kept]


def test_a_failed_conversion_leaves_nothing_behind(write, load, monkeypatch, tmp_path):
    def fail(*_args):
        raise CheckpointError("no more")

    monkeypatch.setattr(module, "_write_tokenizer", fail)
    with pytest.raises(CheckpointError, match="no more"):
        load(write())
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_config_is_checked_before_tensors_are_expanded(write, load, monkeypatch):
    monkeypatch.setattr(module, "_write_weights", None)

    def refuse(config):
        raise UnsupportedModelError(f"no {config.model_type} today")

    with pytest.raises(UnsupportedModelError, match="no llama today"):
        load(write(), check_config=refuse)


def test_load_config_reads_the_metadata_only(write, monkeypatch):
    monkeypatch.setattr(module, "_write_weights", None)
    assert load_config(write()).num_hidden_layers == 3


def test_not_gguf_is_refused(tmp_path, load):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a GGUF file"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.99])
def test_truncated_gguf_is_one_clear_line(write, load, share):
    path = write()
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: damaged") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_unknown_architecture_is_refused(tmp_path, load):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "quux")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="architecture 'quux'"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "metadata",
    [{"llama.rope.scaling.type": "yarn"}, {"llama.attention.key_length": 24.0}, {"llama.embedding_scale": 2.0}],
)
def test_metadata_transformers_drops_is_refused_by_name(write, load, metadata):
    with pytest.raises(UnsupportedModelError, match=f"transformers drops {next(iter(metadata))} "):
        load(write(metadata=metadata))


@pytest.mark.parametrize("metadata", [{"llama.rope.scaling.type": "none"}, {"llama.attention.key_length": 16.0}])
def test_metadata_that_repeats_the_config_is_accepted(write, metadata):
    assert load_config(write(metadata=metadata)).head_dim == 16


def test_dropped_tensors_are_refused_by_name(write, load):
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight, the RoPE scaling, is dropped"):
        load(write(tensors={"rope_freqs.weight": np.ones(8, np.float32)}))


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_model_has_the_perplexity_transformers_has(load):
    from optimc_passes.calibrate import evaluation_windows

    checkpoint = load(REAL)
    assert checkpoint.config.tie_word_embeddings is True
    assert (checkpoint.bos, checkpoint.eos, checkpoint.pad) == (1, (2,), 2)
    windows = evaluation_windows(checkpoint.tokenizer.tokenizer_json)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(weight.read().copy()) for name, weight in checkpoint.weights.items()}
    assert set(model.load_state_dict(state, strict=False).missing_keys) == {"lm_head.weight"}
    losses = []
    with torch.no_grad():
        for window in windows:
            ids = torch.from_numpy(window.astype(np.int64))
            logits = model(ids[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    # The figure belongs to the topics of Python 3.11; other versions reword some of them.
    assert math.exp(np.mean(losses)) == pytest.approx(15.09, rel=0.02)


def test_a_harmed_conversion_is_made_again(write, load, tmp_path):
    path = write()
    expected = load(path).digest
    (kept,) = (tmp_path / "cache" / "gguf").iterdir()
    weights = kept / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert load(path).digest == expected
