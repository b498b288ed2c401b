"""Several limits behind one --slo."""

import pytest

from optimc.cli.slo_option import spread_slo


@pytest.mark.parametrize(
    ("given", "spread"),
    [
        ("bench PLAN --rate 4", "bench PLAN --rate 4"),
        ("bench --slo ttft=500 tpot=40 PLAN", "bench --slo ttft=500 --slo tpot=40 PLAN"),
        ("bench --slo ttft=500 tpot=40 e2e=9000.5", "bench --slo ttft=500 --slo tpot=40 --slo e2e=9000.5"),
        ("bench --slo=ttft=1 tpot=2", "bench --slo=ttft=1 --slo tpot=2"),
        ("bench --slo ttft=500,tpot=40 e2e=1", "bench --slo ttft=500,tpot=40 --slo e2e=1"),
        ("bench --slo ttft=500 PLAN tpot=40", "bench --slo ttft=500 PLAN tpot=40"),
        ("bench tpot=40 --slo ttft=500 --json tpot=3", "bench tpot=40 --slo ttft=500 --json tpot=3"),
        ("bench --slo ttft=x tpot=40", "bench --slo ttft=x --slo tpot=40"),
        ("bench --slo", "bench --slo"),
    ],
)
def test_only_limits_right_after_an_slo_get_one_of_their_own(given, spread):
    assert " ".join(spread_slo(given.split())) == spread


@pytest.mark.parametrize("word", ["tpot=-3", "tpot=1e3", "tpot=.5", "tpot=", "tpot=nan", "e2e=forty"])
def test_a_limit_that_is_none_is_still_a_limit(word):
    assert spread_slo(["bench", "--slo", "ttft=5", word]) == ["bench", "--slo", "ttft=5", "--slo", word]
