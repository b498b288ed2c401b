from dataclasses import replace

import numpy as np
import pytest

from optimc.errors import MeasureError
from optimc.measure.reference import FREE_BYTES_KEPT, RecordedReference, TransformersReference
from optimc_passes.weights import Dense, WeightStore

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def test_logits_are_those_of_the_model_the_weights_came_from(tiny_model, tiny_checkpoint):
    import torch

    with torch.inference_mode():
        expected = tiny_model(torch.from_numpy(TOKENS.astype(np.int64))[None]).logits[0].numpy()
    actual = TransformersReference(tiny_checkpoint).logits(TOKENS)
    assert actual.dtype == np.float32
    # Same weights, same operators; only the attention kernel differs.
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_weights_in_half_precision_are_computed_with_in_float32(tiny_checkpoint):
    import ml_dtypes

    rounded = {
        name: Dense.of(weight.read().astype(ml_dtypes.bfloat16)) for name, weight in tiny_checkpoint.weights.items()
    }
    widened = {name: Dense.of(weight.read().astype(np.float32)) for name, weight in rounded.items()}
    logits = [
        TransformersReference(replace(tiny_checkpoint, weights=WeightStore(weights))).logits(TOKENS)
        for weights in (rounded, widened)
    ]
    np.testing.assert_array_equal(*logits)


def test_a_missing_weight_is_named_not_left_random(tiny_checkpoint):
    weights = {name: w for name, w in tiny_checkpoint.weights.items() if name != "model.norm.weight"}
    with pytest.raises(MeasureError, match=r"no weights for model\.norm\.weight"):
        TransformersReference(replace(tiny_checkpoint, weights=WeightStore(weights)))


class Counting:
    def __init__(self):
        self.calls = 0

    def logits(self, tokens):
        self.calls += 1
        return np.outer(tokens, np.arange(5)).astype(np.float32)


def test_recorded_logits_are_the_same_and_computed_once(tmp_path):
    original = Counting()
    windows = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    recorded = RecordedReference.record(original, windows, tmp_path)
    for _ in range(2):
        for window in windows[::-1]:
            np.testing.assert_array_equal(recorded.logits(window), np.outer(window, np.arange(5)))
    assert original.calls == 2


def test_without_room_on_disk_the_model_itself_is_used(tmp_path):
    original = Counting()
    windows = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    assert RecordedReference.record(original, windows, tmp_path, free_bytes=FREE_BYTES_KEPT + 119) is original
    assert list(tmp_path.iterdir()) == []
