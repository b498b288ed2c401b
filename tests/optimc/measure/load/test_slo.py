"""Limits: how they are written, and who keeps them."""

import pytest

from optimc.errors import ConfigError
from optimc.measure.exchange import Chunk, Exchange
from optimc.measure.load.goodput import Goodput
from optimc.measure.load.slo import Slo


def exchange(ttft_s, tpot_s, tokens=11, failure=None):
    chunks = [Chunk(10 + ttft_s + tpot_s * k, 1) for k in range(tokens)]
    return Exchange(10.0, chunks=chunks, end_s=chunks[-1].at_s, output_tokens=tokens, failure=failure)


def test_limits_are_read_one_by_one_or_with_commas():
    assert Slo.parse(["ttft=500", "tpot=40"]) == Slo.parse(["ttft=500,tpot=40"]) == Slo(ttft_ms=500, tpot_ms=40)
    assert str(Slo.parse(["e2e=9000"])) == "e2e <= 9000 ms"


def test_all_bad_limits_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Slo.parse(["ttft=fast", "itl=3", "tpot=0", "e2e"])
    assert len(caught.value.faults) == 4
    with pytest.raises(ConfigError, match="sets no limit"):
        Slo.parse([])
    with pytest.raises(ConfigError, match="limited twice"):
        Slo.parse(["ttft=1,ttft=2"])


def test_every_limit_must_hold():
    slo = Slo(ttft_ms=500, tpot_ms=40)
    assert slo.met_by(exchange(0.4, 0.03))
    assert slo.broken_by(exchange(0.6, 0.03)) == {"ttft"}
    assert slo.broken_by(exchange(0.6, 0.05)) == {"ttft", "tpot"}


def test_a_failed_request_broke_nothing_else():
    assert Slo(ttft_ms=1).broken_by(exchange(0.4, 0.03, failure="HTTP 503")) == {"failure"}


def test_one_token_has_no_time_per_token_to_judge():
    assert Slo(tpot_ms=1).met_by(exchange(0.4, 0.0, tokens=1))


def test_latency_from_the_schedule_is_what_is_judged():
    late = exchange(0.4, 0.03)
    late.scheduled_s = 9.8  # 0.2 s before it was sent
    assert Slo(ttft_ms=500).broken_by(late) == {"ttft"}


def test_goodput_by_hand():
    # of five: two good, one too slow at first, one throughout, one failed; 4 s in all
    slo = Slo(ttft_ms=500, tpot_ms=40)
    run = [
        exchange(0.4, 0.03),
        exchange(0.1, 0.039),
        exchange(0.6, 0.03),
        exchange(0.6, 0.05),
        exchange(0.4, 0.03, failure="x"),
    ]
    goodput = Goodput.of_run(slo, run, 4.0)
    assert (goodput.met, goodput.of, goodput.per_s, goodput.share) == (2, 5, 0.5, 0.4)
    assert goodput.broken == {"ttft": 2, "tpot": 1, "failure": 1}
    assert (goodput.attained("ttft"), goodput.attained("failure")) == (pytest.approx(0.6), pytest.approx(0.8))
    assert (
        str(goodput) == "2 of 5 requests within the limits (40.0%), 0.5/s; 2 broke ttft, 1 broke tpot, 1 broke failure"
    )
