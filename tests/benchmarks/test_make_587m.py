import math

import numpy as np
from make_587m import random_weight, reshaped, shapes


def test_the_shape_has_587_million_parameters():
    assert sum(math.prod(shape) for shape in shapes(49_152).values()) == 587_237_376


def test_matrices_are_noise_and_norms_do_nothing():
    draw = np.random.default_rng(0)
    assert abs(np.std(random_weight((256, 256), draw).astype(np.float32)) - 0.02) < 5e-4
    assert (random_weight((8,), draw) == 1).all()


def test_what_the_shape_does_not_change_stays():
    config = reshaped({"rope_parameters": {"rope_theta": 1e5}, "hidden_size": 576, "tie_word_embeddings": False})
    assert config["rope_parameters"] == {"rope_theta": 1e5}
    assert (config["hidden_size"], config["tie_word_embeddings"]) == (2048, True)
