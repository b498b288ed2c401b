"""Accuracies and confidence, from guesses whose fate is known."""

from __future__ import annotations

import numpy as np
import pytest

from optimc_passes.heads.measure import (
    Guesses,
    accepted_length,
    accuracies,
    believed,
    confidence,
    isotonic_knots,
    shares_by_rank,
)

RANKS = np.array([[0, 0], [0, 2], [1, 0], [10, 11], [0, 11]])
"""10: not among the guesses; 11: the sample had ended."""


def guesses(ranks=RANKS, kinds=None):
    logprobs = np.tile(np.log(np.array([0.5, 0.2, 0.1, 0.05, 0.05, 0.02, 0.02, 0.02, 0.02, 0.02], np.float32)), (1, 1))
    kinds = ["chat", "chat", "chat", "prose", "prose"] if kinds is None else kinds
    return Guesses(np.array(kinds), ranks, np.broadcast_to(logprobs, (len(ranks), ranks.shape[1], 10)).copy())


def test_a_head_is_judged_where_the_heads_before_it_were_right():
    measured = {(entry.head, entry.kind): entry for entry in accuracies(guesses(), quantized=True)}
    assert measured[0, "all"].tokens == 5
    assert measured[0, "all"].top[:2] == (0.6, 0.8)
    # Of three positions where the first head was right, one was the last of its sample.
    assert measured[1, "all"].tokens == 2
    assert measured[1, "all"].top[:3] == (0.5, 0.5, 1.0)
    assert measured[0, "chat"].tokens == 3
    assert measured[1, "prose"].tokens == 0
    assert all(entry.quantized for entry in measured.values())


def test_shares_are_of_single_ranks():
    first, second = shares_by_rank(accuracies(guesses(), quantized=True))
    assert first[:3] == pytest.approx([0.6, 0.2, 0.0])
    assert second[:3] == pytest.approx([0.5, 0.0, 0.5])


def test_the_accepted_length_counts_first_guesses_up_to_the_first_wrong_one():
    assert accepted_length(np.array([[0, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]])) == pytest.approx(1.5)


def test_knots_rise_and_follow_what_is_right():
    rng = np.random.default_rng(0)
    x = rng.uniform(-4, 0, 20_000)
    y = (rng.random(20_000) < np.exp(x)).astype(float)
    knots = isotonic_knots(x, y)
    places, shares = np.array(knots).T
    assert len(knots) <= 16
    assert (np.diff(places) > 0).all()
    assert (np.diff(shares) > 0).all()
    asked = np.linspace(-3.5, -0.2, 50)
    assert np.abs(np.interp(asked, places, shares) - np.exp(asked)).max() < 0.04


def test_pools_of_guesses_that_fall_are_merged_into_one():
    assert isotonic_knots(np.array([-3.0, -2.0, -1.0]), np.array([1.0, 0.0, 0.0])) == ((-2.0, pytest.approx(1 / 3)),)


def test_confidence_is_of_positions_whose_parents_were_right():
    ranks = np.array([[0, 0]] * 30 + [[1, 3]] * 70)
    (_, second) = (confidence(guesses(ranks, ["chat"] * 100), head) for head in range(2))
    assert second[-1][1] == 1.0, "the second head was always right where the first was"


def test_heads_nobody_measured_are_believed():
    assert all(share == pytest.approx(np.exp(place)) for place, share in believed())
