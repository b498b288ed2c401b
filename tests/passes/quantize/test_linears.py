from transformers import LlamaConfig, Phi3Config

from optimc_passes.quantize.linears import LinearWeight, linear_weights

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def test_llama_has_seven_per_layer_and_a_head():
    found = linear_weights(LlamaConfig(**TINY, num_key_value_heads=2))
    assert len(found) == 15
    assert found[1] == LinearWeight("model.layers.0.self_attn.k_proj.weight", (16, 32))
    assert found[-1] == LinearWeight("lm_head.weight", (64, 32), is_head=True)


def test_a_tied_head_names_the_embedding_it_shares():
    head = linear_weights(LlamaConfig(**TINY, tie_word_embeddings=True))[-1]
    assert head == LinearWeight("lm_head.weight", (64, 32), is_head=True, tied_to="model.embed_tokens.weight")
    assert (head.layer, head.source) == ("lm_head", "model.embed_tokens.weight")


def test_fused_projections_are_linear_layers_as_they_are():
    shapes = {
        linear.layer.rpartition(".")[2]: linear.shape for linear in linear_weights(Phi3Config(**TINY, pad_token_id=0))
    }
    assert shapes["qkv_proj"] == (96, 32)
    assert shapes["gate_up_proj"] == (96, 32)


def test_the_config_is_left_as_it_was():
    config = LlamaConfig(**TINY)
    before = config.to_dict()
    linear_weights(config)
    assert config.to_dict() == before
