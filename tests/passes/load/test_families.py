"""Every supported family: what transformers saves is what we read, name by name and value by value."""

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "smollm3": {},
    "olmo2": {},
    "granite": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_family_arrives_under_its_own_name(family, tmp_path, load):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(SMALL | FAMILIES[family])))
    model.save_pretrained(tmp_path / family)
    checkpoint = load(tmp_path / family)
    # named_parameters gives a tied parameter once, under the embedding's name.
    expected = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    assert set(checkpoint.weights) == set(expected)
    for name, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(weight.read(), expected[name], err_msg=name)
    assert checkpoint.config.tie_word_embeddings == ("lm_head.weight" not in expected)
    assert checkpoint.notes == ("the checkpoint has no tokenizer: only token ids can be served",)
