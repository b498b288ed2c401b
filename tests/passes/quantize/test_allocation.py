"""Spending a budget: within it always, near the best there is, and the frontier says what else could be had."""

import itertools

import numpy as np
import pytest

from optimc_passes.quantize.allocation import Option, allocate, thinned


def random_units(count, seed, options=4):
    rng = np.random.default_rng(seed)
    units = []
    for _ in range(count):
        width, sensitivity = rng.integers(1, 20), rng.lognormal(0, 2)
        bits = sorted(rng.choice(np.arange(2, 12), options, replace=False))
        units.append(
            [Option(int(b), float(b * width), float(sensitivity * 4.0 ** -int(b) * rng.uniform(0.5, 2))) for b in bits]
        )
    return units


def best_by_trying_all(units, budget):
    totals = [
        (sum(option.divergence for option in picked), sum(option.cost for option in picked))
        for picked in itertools.product(*units)
    ]
    return min(divergence for divergence, cost in totals if cost <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_within_the_budget_and_near_the_best_of_all(seed):
    units = random_units(5, seed)
    least, most = (sum(pick(option.cost for option in options) for options in units) for pick in (min, max))
    for share in (0.0, 0.3, 0.6, 1.0):
        budget = least + share * (most - least)
        found = allocate(units, budget)
        assert found.chosen.cost <= budget
        best = best_by_trying_all(units, budget)
        worst = sum(max(option.divergence for option in options) for options in units)
        # The relaxation is exact at points of the hull; between two of them it may lose less than one step.
        assert found.chosen.divergence <= best + 0.1 * (worst - best)


@pytest.mark.parametrize("seed", range(5))
def test_points_of_the_hull_sweep_are_the_best_of_all_for_their_cost(seed):
    units = random_units(5, seed)
    found = allocate(units, float("inf"))
    for point in found.frontier:
        assert point.divergence == pytest.approx(best_by_trying_all(units, point.cost), rel=1e-12)


def test_a_budget_below_the_cheapest_is_none_and_one_above_all_takes_the_best():
    units = random_units(4, 1)
    cheapest = sum(min(option.cost for option in options) for options in units)
    assert allocate(units, cheapest - 1e-9) is None
    assert allocate(units, cheapest).chosen.cost == cheapest
    best = sum(min(option.divergence for option in options) for options in units)
    assert allocate(units, float("inf")).chosen.divergence == pytest.approx(best, rel=1e-12)


def test_the_sensitive_unit_gets_the_bits():
    units = [[Option(bits, bits, weight * 4.0**-bits) for bits in (2, 4, 8)] for weight in (1.0, 1.0, 1000.0)]
    chosen = allocate(units, 4 + 4 + 8).chosen
    assert [units[unit][pick].what for unit, pick in enumerate(chosen.picks)] == [4, 4, 8]


def test_an_option_that_costs_more_and_gains_nothing_is_never_picked():
    units = [[Option("a", 4, 0.1), Option("b", 5, 0.1), Option("c", 6, 0.2), Option("d", 8, 0.05)]] * 3
    for budget in range(12, 30):
        chosen = allocate(units, budget).chosen
        assert {units[unit][pick].what for unit, pick in enumerate(chosen.picks)} <= {"a", "d"}


def test_room_that_no_step_of_the_hull_fits_into_is_filled_with_what_does():
    # On the hull: cost 2 and 8. The budget has room for 4 only, which lies above the line between them.
    assert allocate([[Option(2, 2, 1.0), Option(4, 4, 0.9), Option(8, 8, 0.0)]], 5).chosen.picks == (1,)


def test_the_frontier_rises_in_cost_falls_in_divergence_and_has_the_chosen_point():
    units = random_units(30, 3)
    least, most = (sum(pick(option.cost for option in options) for options in units) for pick in (min, max))
    found = allocate(units, (least + most) / 2)
    assert found.chosen in found.frontier
    for cheap, dear in itertools.pairwise(found.frontier):
        assert cheap.cost < dear.cost
        assert cheap.divergence > dear.divergence
    few = thinned(found, 20)
    assert 3 <= len(few) <= 20
    assert found.chosen in few
    assert {found.frontier[0], found.frontier[-1]} <= set(few)
    assert allocate(units, (least + most) / 2) == found
