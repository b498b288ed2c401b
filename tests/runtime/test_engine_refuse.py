"""What is refused on arrival."""

import pytest

from optimc.errors import ConfigError, OverloadedError, RequestError
from optimc_runtime.config import EngineConfig
from optimc_runtime.request import Terms


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody(make_engine, drive):
    engine = make_engine(num_blocks=8, max_seq_len=64)
    for length in (31, 32, 33, 63, 64, 65):
        with pytest.raises(RequestError):
            drive.submit(engine, [1] * length, drive.greedy(10_000))
    small = drive.submit(engine, [1, 2, 3], drive.greedy(3))
    for _ in range(3):
        engine.step()
    assert small.reason == "length"
    drive.assert_idle(engine)


def test_ids_outside_the_vocabulary_are_refused_by_field(make_engine, drive):
    engine = make_engine()
    for params, field in (
        (drive.greedy(1, stop_token_ids=(64,)), "stop_token_ids"),
        (drive.greedy(1, logit_bias={64: 1.0}), "logit_bias"),
        (drive.greedy(1, stop=("x",)), "stop"),
    ):
        with pytest.raises(RequestError) as caught:
            drive.submit(engine, [1], params)
        assert caught.value.param == field


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end(make_engine, drive):
    engine = make_engine()
    drive.submit(engine, [1], drive.greedy(2), request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        drive.submit(engine, [1], drive.greedy(2), request_id="a")
    drive.run(engine)
    again = drive.submit(engine, [1], drive.greedy(2), request_id="a")
    drive.run(engine)
    assert again.reason == "length"


def test_a_full_queue_refuses_at_once_and_accepted_requests_finish(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=2, max_queued_requests=4))
    accepted, refused = [], 0
    for _ in range(50):
        try:
            accepted.append(drive.submit(engine, [1], drive.greedy(3)))
        except OverloadedError:
            refused += 1
    assert (len(accepted), refused) == (6, 44)
    drive.run(engine)
    assert {inbox.reason for inbox in accepted} == {"length"}


@pytest.mark.parametrize("tenant", ["", "blue"])
def test_an_idle_engine_takes_in_as_many_as_it_says(make_engine, drive, tenant):
    engine = make_engine(EngineConfig(max_seqs=2, max_queued_requests=5))
    for _ in range(engine.max_unfinished(tenant)):
        drive.submit(engine, [1], drive.greedy(3), terms=Terms(tenant))
    with pytest.raises(OverloadedError):
        drive.submit(engine, [1], drive.greedy(3), terms=Terms(tenant))
    drive.run(engine)


def test_the_queue_is_bounded_in_tokens_but_never_closed_to_a_lone_request(make_engine, drive):
    engine = make_engine(EngineConfig(max_queued_tokens=10))
    drive.submit(engine, [1] * 30, drive.greedy(1))
    with pytest.raises(OverloadedError, match="30 prompt tokens are waiting; 1 more would exceed 10"):
        drive.submit(engine, [1], drive.greedy(1))
    engine.step()
    drive.submit(engine, [1], drive.greedy(1))
    drive.run(engine)


def test_options_beyond_the_plan_stop_the_start(make_engine):
    with pytest.raises(ConfigError, match="max_seq_len: 128 exceeds the 64"):
        make_engine(EngineConfig(max_seq_len=128), max_seq_len=64)
