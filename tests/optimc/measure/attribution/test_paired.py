"""Pairs of blocks: with, without, without, with."""

import math

import pytest

from optimc.measure.attribution.block import Block
from optimc.measure.attribution.paired import measure_pair
from optimc.measure.workload import Workload


def block(ms, *, tokens_per_s=None, failures=0):
    return Block(ms, ms, tokens_per_s, 1000 / ms, 8, failures, "HTTP 503" if failures else None, 1.0)


class Scripted:
    def __init__(self, times):
        self.times = times
        self.seen = []

    def __call__(self, side, workload):
        self.seen.append((side, workload.seed))
        return block(self.times(len(self.seen) - 1, side))


def test_blocks_alternate_so_that_each_side_is_first_once_and_both_get_the_same_prompts():
    measure = Scripted(lambda *_: 1.0)
    measure_pair(Workload(seed=7), 2, measure)
    turns = ["with", "without", "without", "with"]
    assert measure.seen == [(side, 7) for side in turns] + [(side, 8) for side in turns]


def test_a_planted_ratio_comes_out():
    figures = measure_pair(Workload(), 3, Scripted(lambda _, side: 12.0 if side == "with" else 10.0))
    ratio = figures.ratio("tpot_p50")
    assert ratio.value == pytest.approx(1.2, rel=1e-12)
    assert (ratio.pairs, ratio.excludes_one) == (3, True)


def test_a_drift_of_one_percent_per_block_cancels():
    figures = measure_pair(Workload(), 3, Scripted(lambda n, side: 1.01**n * (12.0 if side == "with" else 10.0)))
    # Blocks 0 and 3 against 1 and 2: 1.01^3 on both sides, in every pair.
    assert figures.ratios("tpot_p50") == pytest.approx([1.2] * 3, rel=1e-12)


def test_no_effect_leaves_one_inside_the_interval():
    noise = [1.0, 1.02, 0.99, 1.01, 0.98, 1.03, 1.0, 0.97, 1.02, 1.01, 1.0, 0.99]
    figures = measure_pair(Workload(), 3, Scripted(lambda n, _: noise[n]))
    ratio = figures.ratio("ttft_p50")
    assert not ratio.excludes_one
    # By hand, pair 1: sqrt(1.0 * 1.01) / sqrt(1.02 * 0.99).
    assert figures.ratios("ttft_p50")[0] == pytest.approx(math.sqrt(1.01 / (1.02 * 0.99)), rel=1e-12)


def test_throughputs_are_of_one_kind_on_both_sides():
    steady = iter([100.0, None, 100.0, 100.0])
    figures = measure_pair(Workload(), 1, lambda _side, _load: block(2.0, tokens_per_s=next(steady)))
    # One block has no steady state: all are taken over the whole run, 1000 / 2 tokens/s.
    assert figures.values("with", "tokens_per_s") == [500.0, 500.0]


def test_a_metric_that_a_block_lacks_is_no_figure():
    figures = measure_pair(Workload(), 1, lambda *_: Block(5.0, None, None, 1.0, 8, 0, None, 1.0))
    assert figures.ratio("tpot_p50") is None
    assert figures.ratio("ttft_p50").value == 1


def test_failed_requests_are_told_with_their_side():
    figures = measure_pair(Workload(), 1, lambda side, _load: block(1.0, failures=2 if side == "without" else 0))
    assert figures.failure == "2 of 8 requests failed without it: HTTP 503"


def test_blocks_that_are_known_are_not_measured_again():
    known = {(0, place): block(10.0) for place in range(3)}
    measure, saved = Scripted(lambda *_: 10.0), []
    measure_pair(
        Workload(), 1, measure, load=lambda *at: known.get(at), save=lambda pair, place, _: saved.append((pair, place))
    )
    assert measure.seen == [("with", 0)]
    assert saved == [(0, 3)]
