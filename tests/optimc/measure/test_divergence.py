import math

import numpy as np
import pytest

from optimc.measure.divergence import ROWS, WindowScore, score_window


def logits_of(probabilities) -> np.ndarray:
    """Any shift gives the same distribution; a different one per row shows that it does."""
    rows = np.log(np.asarray(probabilities))
    return (rows + np.arange(len(rows))[:, None] * 3).astype(np.float32)


MODEL = [[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]
REFERENCE = [[0.25, 0.5, 0.25], [0.1, 0.7, 0.2], [0.6, 0.2, 0.2]]


def test_sums_by_hand():
    # Row 0 predicts token 1, row 1 predicts token 2; row 2 predicts nothing.
    score = score_window(np.array([0, 1, 2]), logits_of(MODEL), logits_of(REFERENCE))
    assert score.predictions == 2
    assert score.nll == pytest.approx(-math.log(0.25) - math.log(0.1), rel=1e-6)
    assert score.reference_nll == pytest.approx(-math.log(0.5) - math.log(0.2), rel=1e-6)
    first = 0.25 * math.log(0.25 / 0.5) + 0.5 * math.log(0.5 / 0.25)
    second = 0.7 * math.log(0.7 / 0.8) + 0.2 * math.log(0.2 / 0.1)
    assert score.kl == pytest.approx(first + second, rel=1e-6)
    assert score.top1_matches == 1
    assert score.perplexity == pytest.approx(math.sqrt(40), rel=1e-6)
    assert score.reference_perplexity == pytest.approx(math.sqrt(10), rel=1e-6)


def test_equal_models_do_not_diverge():
    logits = np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32) * 10
    score = score_window(np.arange(20), logits, logits)
    assert score.kl == 0.0
    assert score.top1_matches == score.predictions == 19


def test_kl_is_directed():
    a = score_window(np.array([0, 1, 2]), logits_of(MODEL), logits_of(REFERENCE)).kl
    b = score_window(np.array([0, 1, 2]), logits_of(REFERENCE), logits_of(MODEL)).kl
    assert a != pytest.approx(b)


@pytest.mark.parametrize("length", [2, ROWS, ROWS + 1, ROWS + 2, 3 * ROWS])
def test_chunking_does_not_change_the_sums(length):
    random = np.random.default_rng(length)
    own, other = random.normal(size=(2, length, 17)).astype(np.float32)
    tokens = random.integers(0, 17, length)

    def log_softmax(x):
        return x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True))

    p, q = log_softmax(other[:-1]), log_softmax(own[:-1])
    score = score_window(tokens, own, other)
    assert score.predictions == length - 1
    assert score.kl == pytest.approx((np.exp(p) * (p - q)).sum(), rel=1e-9)
    assert score.nll == pytest.approx(-q[np.arange(length - 1), tokens[1:]].sum(), rel=1e-9)


def test_extreme_logits_neither_overflow_nor_lose_the_tail():
    logits = np.array([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], np.float32)
    score = score_window(np.array([0, 1]), logits, logits)
    assert score.nll == pytest.approx(1e4)
    assert score.kl == 0.0
    assert score.perplexity == math.inf


def test_without_reference_there_is_likelihood_only():
    score = score_window(np.array([0, 1, 2]), logits_of(MODEL), None)
    assert score.nll == pytest.approx(-math.log(0.25) - math.log(0.1), rel=1e-6)
    assert (score.reference_nll, score.kl, score.top1_matches) == (0, 0, 0)


def test_what_is_not_finite_is_named():
    logits = np.zeros((ROWS + 5, 3), np.float32)
    logits[ROWS + 2, 1] = np.nan
    with pytest.raises(ValueError, match=f"position {ROWS + 2} are not finite"):
        score_window(np.zeros(ROWS + 5, int), logits, None)


def test_shapes_must_fit():
    logits = np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match=r"logits have shape \[4, 3\], want \[5, 3\]"):
        score_window(np.zeros(5, int), logits, None)
    with pytest.raises(ValueError, match=r"reference logits have shape \[4, 2\], want \[4, 3\]"):
        score_window(np.zeros(4, int), logits, logits[:, :2])


def test_windows_add_up():
    total = WindowScore(2, 1.0, 2.0, 0.5, 1) + WindowScore(3, 1.0, 2.0, 0.5, 2)
    assert total == WindowScore(5, 2.0, 4.0, 1.0, 3)
