"""The parts of the serving benchmarks that decide what was seen and whether it is good."""

import asyncio
import socket
import threading
import time
from collections import Counter

import pytest
from serving_client import read_streams
from serving_hostile import Hostile
from serving_load import Reply, ask, request, total
from serving_mix import Errand, Mix
from serving_overhead import has_text
from serving_soak import Sample, Soak, course, growth, judge, outcome


@pytest.fixture
def stub():
    """Answer each connection with given parts, a pause before each; remember what was asked."""
    listener = socket.create_server(("127.0.0.1", 0))
    parts: list[bytes] = []
    asked: list[bytes] = []

    def answer():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            asked.append(connection.recv(1 << 16))
            for part in parts:
                time.sleep(0.05)
                connection.sendall(part)
            connection.close()

    threading.Thread(target=answer, daemon=True).start()
    yield listener.getsockname(), parts, asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def chunked(*events):
    return [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *(b"%x\r\n%s\r\n" % (len(e), e) for e in events)]


def test_a_stream_is_read_with_the_time_of_each_event(stub):
    address, parts, asked = stub
    parts += [*chunked(b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n", b"data: [DONE]\n\n"), b"0\r\n\r\n"]
    reply = asyncio.run(ask(address, request("/x", {"a": 1}, key="secret")))
    assert reply.status == 200
    assert [data for _, data in reply.events] == ["1", "2", "3", "[DONE]"]
    times_s = [arrived_s for arrived_s, _ in reply.events]
    assert times_s[0] < times_s[1] == times_s[2] < times_s[3]
    assert reply.is_finished
    assert b"Authorization: Bearer secret\r\n" in asked[0]
    assert asked[0].endswith(b'\r\n\r\n{"a": 1}')


def test_a_stream_that_is_cut_is_not_finished_and_a_client_may_leave(stub):
    address, parts, _ = stub
    parts += chunked(b"data: 1\n\n", b"data: 2\n\n")
    cut = asyncio.run(ask(address, request("/x", {})))
    assert len(cut.events) == 2
    assert not cut.is_finished
    left = asyncio.run(ask(address, request("/x", {}), leave_after=1))
    assert [data for _, data in left.events] == ["1"]
    assert asyncio.run(ask(address, request("/x", {}), leave_after=0)).status == 0


def test_the_cheap_client_counts_the_servers_tokens_and_takes_no_half_answer(stub):
    address, parts, _ = stub
    usage = b'data: {"choices":[],"usage":{"completion_tokens":7}}\n\n'
    whole = chunked(b"data: x\n\n", usage, b"data: [DONE]\n\n")
    parts += [*whole, b"0\r\n\r\n"]
    figures = read_streams(*address, "/x", ["{}", "{}"])
    assert figures["tokens"] == 14
    assert figures["seconds"] >= 0.2
    parts[:] = whole[:2]
    with pytest.raises(RuntimeError, match="no whole stream"):
        read_streams(*address, "/x", ["{}"])
    parts[:] = [b"HTTP/1.1 429 x\r\nContent-Length: 4\r\n\r\nbusy"]
    with pytest.raises(RuntimeError, match="busy"):
        read_streams(*address, "/x", ["{}"])


def test_hostile_requests_and_errands_are_the_same_for_the_same_seed():
    def drawn(seed):
        return [Hostile(seed).draw() for _ in range(3)], [Mix(seed, longest=50, key="", canary=None).draw().data]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    kinds = Counter(Mix(number, longest=50, key="k", canary=None).draw().kind for number in range(400))
    assert len(kinds) == 12, kinds


def test_only_events_with_text_make_gaps():
    assert has_text('{"choices": [{"delta": {"content": "a"}}]}')
    assert not has_text('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}')
    assert not has_text('{"choices": []}')
    assert not has_text("[DONE]")


def test_an_errand_ends_as_it_has_to():
    def check(reply):
        assert reply.body == b"good"

    plain = Errand("plain", b"", check)
    assert outcome(plain, Reply(200, body=b"good")) == "finished"
    assert outcome(plain, Reply(429, {"retry-after": "1"})) == "refused as too much"
    assert outcome(Errand("hostile", b"", None), Reply(400)) == "refused as bad"
    assert outcome(Errand("leaves", b"", None, 3), Reply(0)) == "left"
    for errand, reply in (
        (plain, Reply(200, body=b"bad")),
        (plain, Reply(400)),
        (plain, Reply(0)),
        (Errand("hostile", b"", None), Reply(500)),
    ):
        with pytest.raises(AssertionError):
            outcome(errand, reply)


def samples(*sizes):
    return [Sample(at_s=5.0 * number, resident_bytes=size, files=10, threads=4) for number, size in enumerate(sizes)]


def test_the_course_of_memory_is_told_in_tenths():
    samples = [Sample(float(at), at * 1_000_000, 10, 4) for at in range(20)]
    assert course(samples).split() == [f"{0.5 + 2 * tenth:.1f}" for tenth in range(10)]
    assert course(samples[:1]) == "0.0"


def test_growth_is_a_slope_with_its_error_and_leaves_out_the_start():
    filling = [1_000_000 * number for number in range(24)]
    steady = samples(*filling, *([24_000_000] * 96))
    slope, error = growth(steady)
    assert slope == pytest.approx(0, abs=1e-6)
    leaking = samples(*filling, *(24_000_000 + 50_000 * number + 200_000 * (number % 2) for number in range(96)))
    slope, error = growth(leaking)
    assert slope == pytest.approx(10_000, rel=0.02)
    assert slope > 2 * error
    assert growth(samples(1, 2))[1] == float("inf"), "two samples tell nothing"


METRICS = {
    'optimc_requests_total{outcome="stop"}': 2, 'optimc_requests_total{outcome="length"}': 1,
    'optimc_requests_total{outcome="abort"}': 1, 'optimc_requests_total{outcome="error"}': 0,
    "optimc_requests_running": 0, "optimc_requests_waiting": 0, "optimc_kv_usage_ratio": 0.25, "optimc_kv_blocks": 8,
    "optimc_prefix_cache_pinned_blocks": 2,
}  # fmt: skip
LINES = [
    {"answer_id": "a", "status": 200, "finish_reason": ["stop", "length", "stop"]},
    {"answer_id": "b", "status": 200, "finish_reason": "abort"},
    {"answer_id": "c", "status": 429, "finish_reason": None},
    {"path": "/metrics", "status": 200},
]


def test_a_soak_is_good_if_everything_adds_up():
    soak = Soak(Counter({("stream", "finished"): 2}), [], samples(*[1000] * 100))
    assert all(verdict.is_good for verdict in judge(soak, METRICS, LINES, soak.samples[:2]))


@pytest.mark.parametrize(
    ("changed", "lines", "bad"),
    [
        ({"optimc_requests_running": 1}, LINES, "running or waiting"),
        ({"optimc_kv_usage_ratio": 0.5}, LINES, "blocks in use"),
        ({'optimc_requests_total{outcome="stop"}': 3}, LINES, "accepted choices"),
        ({'optimc_requests_total{outcome="abort"}': 2}, LINES, "accepted choices"),
        ({}, [*LINES, {"answer_id": "d", "status": 200, "finish_reason": None}], "accepted choices"),
        ({}, [*LINES, {"path": "/", "status": 500}], "lines of the log"),
        ({}, [*LINES, {"level": "error", "event": "stalled"}], "lines of the log"),
    ],
)
def test_a_soak_is_bad_if_something_is_left_or_lost(changed, lines, bad):
    soak = Soak(Counter({("stream", "finished"): 2}), [], samples(*[1000] * 100))
    verdicts = judge(soak, {**METRICS, **changed}, lines, soak.samples[:2])
    assert [verdict.what.startswith(bad) for verdict in verdicts if not verdict.is_good] == [True]


def test_metrics_are_summed_over_labels():
    assert total({'a{x="1"}': 1, 'a{x="2"}': 2, "a": 3, "ab": 9}, "a") == 6
