"""What is cut when time is short, in the stated order."""

from optimc.measure.attribution.budget import Cost, fit
from optimc.measure.workload import Workload

# 32 measured + 8 before them: a block of 10 s has 40 requests of 0.25 s.
LARGE = Cost(Workload(concurrency=8, requests=32, warmup_requests=8), 10.0)
SMALL = Cost(Workload(concurrency=1, requests=8, warmup_requests=2), 5.0)


def test_everything_is_measured_where_it_fits():
    # 4 pairs of 4 blocks: 4 * 4 * (10 + 5) = 240 s.
    found = fit([LARGE, SMALL], 4, 240)
    assert (found.pairs, found.most_requests, found.measured, found.notes) == (4, None, 2, ())


def test_pairs_shrink_first():
    # 3 * 4 * 15 = 180 s.
    found = fit([LARGE, SMALL], 4, 239)
    assert (found.pairs, found.most_requests, found.measured) == (3, None, 2)
    assert found.notes == ("budget: 3 pairs instead of 4",)


def test_then_requests_shrink_to_what_fits():
    # 150 s = 12 * (5 + 7.5): the large block may take 7.5 s, 30 requests, 22 of them measured.
    found = fit([LARGE, SMALL], 4, 150)
    assert (found.pairs, found.most_requests, found.measured) == (3, 22, 2)
    assert found.notes[1] == "budget: at most 22 requests per block instead of 32"


def test_then_comparisons_go_from_the_end():
    # With 8 requests the large block takes 16 * 0.25 = 4 s: 12 * 4 = 48 s; 12 * 5 = 60 s more would not fit.
    found = fit([LARGE, SMALL], 4, 100)
    assert (found.pairs, found.most_requests, found.measured) == (3, 8, 1)
    assert found.notes[2] == "budget: 1 of 2 comparisons are not measured, from the end"


def test_nothing_is_measured_where_not_even_one_fits():
    assert fit([LARGE], 3, 1).measured == 0
