import gc
import weakref

import numpy as np

from optimc_passes.graph.attach import attach_weights
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Dense


def rms(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def reference(decoder, tokens):
    """The decoder in float64 NumPy."""
    w = {name: array.astype(np.float64) for name, array in decoder.arrays.items()}
    x = w["model.embed_tokens.weight"][tokens]
    length = len(tokens)
    for layer in range(decoder.layers):
        at = f"model.layers.{layer}"
        h = rms(x, w[f"{at}.input_layernorm.weight"])
        q, k, v = (h @ w[f"{at}.self_attn.{role}_proj.weight"].T for role in "qkv")
        q = q.reshape(length, decoder.heads, -1)
        k, v = (
            np.repeat(y.reshape(length, decoder.kv_heads, -1), decoder.heads // decoder.kv_heads, 1) for y in (k, v)
        )
        scores = np.einsum("thd,shd->hts", q, k) * decoder.head_dim**-0.5
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, v).reshape(length, -1)
        x = x + out @ w[f"{at}.self_attn.o_proj.weight"].T
        h = rms(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{at}.mlp.{role}_proj.weight"].T for role in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def test_the_logits_of_every_probe_token_are_the_models(tiny_decoder):
    decoder = tiny_decoder()
    probe = Probe.of_vocabulary(48, 17)
    logits = evaluate(attach_weights(decoder.model, decoder.store), probe)
    # Two layers of float32 against float64.
    np.testing.assert_allclose(logits, reference(decoder, probe.tokens), rtol=1e-4, atol=1e-4)


def test_a_probe_is_the_same_every_time_and_stays_inside_the_vocabulary():
    tokens = Probe.of_vocabulary(5, 1000).tokens
    assert set(tokens.tolist()) == set(range(5))
    assert np.array_equal(tokens, Probe.of_vocabulary(5, 1000).tokens)


def test_weights_are_let_go_afterwards(tiny_decoder):
    decoder = tiny_decoder()
    alive = []

    def lazy(array):
        def read():
            copy = array.copy()
            alive.append(weakref.ref(copy))
            return copy

        return Dense(array.shape, array.dtype, read)

    store = decoder.store.replace({name: lazy(array) for name, array in decoder.arrays.items()})
    evaluate(attach_weights(decoder.model, store), Probe.of_vocabulary(48, 3))
    gc.collect()
    assert len(alive) == len(decoder.arrays)
    assert not any(reference() is not None for reference in alive)
