"""What is worth verifying, who is asked, and what proposers' words are worth."""

import itertools
import random

import pytest

from optimc_runtime.speculate.calibration import SURE, Calibration
from optimc_runtime.speculate.controller import LONGEST_SLEEP, SHORTEST_SLEEP, STRIKES, Attention, choose
from optimc_runtime.speculate.cost_model import MOST_ROWS, CostModel
from optimc_runtime.speculate.proposal import Proposal
from optimc_runtime.speculate.tree import chain

MEASURED = ((1, 1.92e-3), (2, 2.06e-3), (3, 2.05e-3), (4, 2.25e-3), (5, 2.74e-3), (8, 4.6e-3), (16, 6.53e-3))


def brute_force(estimates, num_sequences, other_rows, cost, draft_s):
    def rate(n):
        rows = num_sequences + other_rows + n
        return (num_sequences + sum(estimates[:n])) / (cost.seconds(num_sequences, rows) + draft_s)

    return max(range(len(estimates) + 1), key=lambda n: (rate(n), -n))


@pytest.mark.parametrize("num_sequences", [1, 4, 16])
@pytest.mark.parametrize("other_rows", [0, 7])
def test_the_number_of_nodes_is_the_best_of_all(num_sequences, other_rows):
    random_ = random.Random(num_sequences)
    cost = CostModel(MEASURED, 5e-5)
    chosen = set()
    for _ in range(300):
        estimates = sorted((random_.random() for _ in range(random_.randrange(20))), reverse=True)
        draft_s = random_.choice([0, 1e-5, 3e-4])
        n = choose(estimates, num_sequences, other_rows, cost, draft_s)
        assert n == brute_force(estimates, num_sequences, other_rows, cost, draft_s)
        chosen.add(n)
    assert len(chosen) > 2


def test_nothing_is_verified_where_every_row_costs_a_whole_step():
    steep = CostModel([(1, 1e-3), (2, 2e-3), (4, 4e-3)])
    assert choose([0.98] * 8, 1, 0, steep, 0.0) == 0
    assert choose([0.98] * 8, 1, 0, CostModel([(1, 1e-3), (9, 1e-3)]), 0.0) == 8


def test_a_gain_below_the_least_is_none():
    cost = CostModel([(1, 1e-3), (2, 1e-3), (3, 9e-3)])
    assert choose([0.05], 1, 0, cost, 0.0) == 1
    assert choose([0.05], 1, 0, cost, 0.0, least_gain=0.06) == 0


def test_costs_are_what_was_measured_and_lines_between():
    cost = CostModel(MEASURED, per_sequence_s=1e-4)
    assert cost.seconds(1, 4) == pytest.approx(2.25e-3)
    assert cost.seconds(1, 12) == pytest.approx((4.6e-3 + 6.53e-3) / 2)
    assert cost.seconds(3, 4) == pytest.approx(2.45e-3)
    beyond = cost.seconds(1, MOST_ROWS + 100) - cost.seconds(1, MOST_ROWS)
    assert beyond == pytest.approx(100 * (6.53e-3 - 4.6e-3) / 8)
    assert cost.by_rows(3, 4, 2) == [cost.seconds(3, rows) for rows in (4, 5, 6)]


def test_more_rows_never_cost_less_whatever_was_measured():
    cost = CostModel([(1, 2e-3), (2, 1e-3), (3, 3e-3)])
    seconds = cost.by_rows(1, 1, 30)
    assert seconds == sorted(seconds)
    assert seconds[:3] == pytest.approx([1.5e-3, 1.5e-3, 3e-3])
    for _ in range(500):
        cost.correct(1, 3, 1e-3)
    seconds = cost.by_rows(1, 1, 30)
    assert seconds == sorted(seconds)


def test_costs_follow_what_steps_take():
    cost = CostModel(MEASURED)
    for _ in range(300):
        cost.correct(1, 1, 4e-3)
        cost.correct(1, 4, 5e-3)
    assert cost.seconds(1, 1) == pytest.approx(4e-3, rel=0.05)
    assert cost.seconds(1, 4) == pytest.approx(5e-3, rel=0.05)


def test_one_slow_step_hardly_counts():
    cost = CostModel(MEASURED)
    cost.correct(1, 4, 1.0)
    assert cost.seconds(1, 4) < 1.02 * 2.25e-3


def test_costs_stay_above_nothing_however_wrong_they_were():
    cost = CostModel([(1, 2e-3), (12, 5e-3), (16, 7e-3)])
    for _ in range(2000):
        cost.correct(1, 16, 1e-4)
    assert 0 < cost.seconds(1, 1) <= cost.seconds(1, 16)
    for _ in range(2000):
        cost.correct(1, 1, 2e-3)
    assert cost.seconds(1, 1) == pytest.approx(2e-3, rel=0.05)


def test_costs_believed_too_high_are_unlearned_sooner_than_those_too_low():
    def error(factor):
        cost = CostModel([(rows, factor * seconds) for rows, seconds in MEASURED])
        for _ in range(40):
            cost.correct(1, 4, 2.25e-3)
        return abs(cost.seconds(1, 4) - 2.25e-3)

    assert error(2.0) < 0.5 * error(0.5)


def test_a_proposer_that_is_never_worth_it_is_asked_less_and_less():
    attention = Attention()
    asked, step = [], 0
    while step < 20_000:
        if attention.wakes_at <= step:
            asked.append(step)
            attention.strike(step, cost_s=1e-3, step_s=2e-4)  # dear enough to sleep as long as any
        step += 1
    assert asked[:STRIKES] == list(range(STRIKES))
    gaps = [b - a - 1 for a, b in itertools.pairwise(asked[STRIKES - 1 :])]
    longest = int(1e-3 / (1e-3 * 2e-4))
    assert longest > LONGEST_SLEEP
    assert gaps[:7] == [32, 64, 128, 256, 512, 1024, 2048]
    assert set(gaps[7:]) == {LONGEST_SLEEP}


def test_a_cheap_proposer_sleeps_shorter():
    attention = Attention()
    for step in range(0, 40_000, 4000):
        for _ in range(STRIKES):
            attention.strike(step, cost_s=1e-5, step_s=2e-3)
        assert attention.wakes_at == step + 1 + SHORTEST_SLEEP


def test_a_gain_ends_the_back_off():
    attention = Attention()
    for _ in range(STRIKES + 3):
        attention.strike(0, 1.0, 1e-3)
    assert attention.is_probing
    attention.settle(1e-3)
    assert not attention.is_probing
    for _ in range(STRIKES - 1):
        attention.strike(1000, 1.0, 1e-3)
    assert attention.wakes_at < 1000
    attention.strike(1000, 1.0, 1e-3)
    assert attention.wakes_at == 1001 + SHORTEST_SLEEP


def a_chain(*confidences: float) -> Proposal:
    return Proposal(chain(len(confidences)), list(range(len(confidences))), list(confidences))


def test_estimates_of_a_new_proposer_are_its_own_word():
    calibration = Calibration()
    assert calibration.estimates(0, a_chain(0.5, 0.5, 0.9)) == pytest.approx([0.5, 0.25, 0.225])
    assert calibration.estimates(0, a_chain(1.0)) == [SURE]
    tree = Proposal((-1, -1, 0, 2), [1, 2, 3, 4], [0.6, 0.3, 0.5, 0.5])
    assert calibration.estimates(0, tree) == pytest.approx([0.6, 0.3, 0.3, 0.15])


def test_a_chain_ends_where_nothing_is_to_be_hoped():
    assert len(Calibration().estimates(0, a_chain(0.5, 0.5, 0.1, 0.9))) == 2


def test_estimates_learn_what_guesses_are_worth():
    random_ = random.Random(0)
    calibration = Calibration()
    for order in range(400):
        path = []
        while len(path) < 2 and random_.random() < 0.5:
            path.append(len(path))
        calibration.learn(order, (-1, 0), [0.8, 0.8], path)
        calibration.forget(order)
    first, second = calibration.estimates(1000, a_chain(0.8, 0.8))
    assert first == pytest.approx(0.5, abs=0.1)
    assert second / first == pytest.approx(0.5, abs=0.15)


def test_a_sequence_that_does_better_than_all_is_believed_more():
    calibration = Calibration()
    for order in range(200):
        calibration.learn(order, (-1,), [0.5], [0] if order % 4 == 0 else [])
    usual = calibration.estimates(1000, a_chain(0.5))[0]
    for _ in range(10):
        calibration.learn(1000, (-1,), [0.5], [0])
    better = calibration.estimates(1000, a_chain(0.5))[0]
    assert better > 1.5 * usual
    for _ in range(300):
        calibration.fade(1000)
    assert calibration.estimates(1000, a_chain(0.5))[0] < 0.5 * (usual + better)


def test_what_hangs_below_a_wrong_guess_says_nothing():
    calibration = Calibration()
    for _ in range(100):
        calibration.learn(0, (-1, 0), [0.9, 0.9], [])
    calibration.forget(0)
    tree = Proposal((-1, 0), [1, 2], [0.5, 0.9])  # the first of another class
    first, second = calibration.estimates(1, tree)
    assert second / first == pytest.approx(0.9)


def test_children_are_never_likelier_than_parents():
    random_ = random.Random(1)
    calibration = Calibration()
    for _ in range(200):
        parents = tuple(random_.randrange(-1, node) if node else -1 for node in range(8))
        proposal = Proposal(parents, list(range(8)), [random_.random() for _ in range(8)])
        path, parent = [], -1
        while children := [node for node in range(8) if parents[node] == parent]:
            parent = random_.choice(children)
            path.append(parent)
        calibration.learn(0, parents, proposal.confidences, path[: random_.randrange(4)])
        estimates = calibration.estimates(0, proposal)
        if len(estimates) == 8:
            assert all(parent < 0 or estimates[node] <= estimates[parent] for node, parent in enumerate(parents))
