import numpy as np
from make_587m import random_weights, reshaped


def test_the_shape_has_587_million_parameters():
    # A vocabulary of 1 gives all parameters but the embedding's.
    tensors = dict(random_weights(vocab_size=1))
    count = sum(tensor.size for tensor in tensors.values()) - 2048 + 49_152 * 2048
    assert count == 587_237_376
    assert tensors["model.layers.7.mlp.down_proj.weight"].shape == (2048, 8192)
    assert abs(np.std(tensors["model.layers.0.self_attn.k_proj.weight"].astype(np.float32)) - 0.02) < 1e-4


def test_what_the_shape_does_not_change_stays():
    config = reshaped({"rope_parameters": {"rope_theta": 1e5}, "hidden_size": 576, "tie_word_embeddings": False})
    assert config["rope_parameters"] == {"rope_theta": 1e5}
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (2048, True)
