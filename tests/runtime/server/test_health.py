"""Alive, ready, draining, stuck: what probes and the log are told, and what requests out of time are."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from optimc_runtime.server import HttpServer, ServerOptions, build_app
from optimc_runtime.server.watchdog import watch


@pytest.mark.parametrize(
    ("stalled_s", "healthy", "live", "status"),
    [
        (0.0, True, 200, "ok"),
        (30.0, True, 200, "ok"),
        (30.1, True, 503, "stalled"),
        (math.inf, False, 503, "broken"),
        (0.0, False, 503, "broken"),
    ],
)
def test_alive_means_the_engine_moves(served, stalled_s, healthy, live, status):
    served.engine.stalled, served.engine.healthy = stalled_s, healthy
    for path in ("/health", "/health/live", "/health/ready"):
        reply = served.http.get(path)
        assert (reply.status_code, reply.json()["status"]) == (live, status)
    assert served.metric("optimc_step_stalled_seconds") == stalled_s


def test_a_server_that_drains_is_alive_and_not_ready_and_takes_nothing_new(engine, script, error_of):
    engine.script = script(pieces=["a"] * 12, delay_s=0.1)
    running = {}
    server = HttpServer(build_app(engine, model_name="m"), port=0)
    serving = threading.Thread(target=server.run)
    serving.start()
    post = partial(httpx.post, f"{server.url}/v1/completions", trust_env=False, timeout=20)
    asking = threading.Thread(target=lambda: running.update(reply=post(json={"prompt": "a", "stream": True})))
    asking.start()
    while not engine.submitted:
        time.sleep(0.01)
    kept, new = (httpx.Client(base_url=server.url, trust_env=False) for _ in range(2))
    with kept, new:
        assert "optimc_draining 0.0" in kept.get("/metrics").text
        assert kept.get("/health/ready").status_code == 200
        server.stop()
        while (ready := kept.get("/health/ready")).status_code == 200:
            time.sleep(0.01)
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert "optimc_draining 1.0" in kept.get("/metrics").text
        for client in (kept, new):
            assert client.get("/health/live").status_code == 200
            refused = client.post("/v1/completions", json={"prompt": "b"})
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "draining"
            assert refused.headers["connection"] == "close"
            assert refused.headers["retry-after"] == "1"
    assert not engine.submitted[0].ended.is_set(), "the answer was to outlast all this"
    asking.join(10)
    assert b"[DONE]" in running["reply"].content
    serving.join(5)
    assert not serving.is_alive(), "the end of the last answer is the end of the server"
    assert len(engine.submitted) == 1


def _watching(stalls, caplog):
    """Watch an engine whose stall grows as given, one value a look, and return the events logged."""
    stats = SimpleNamespace(running=3, waiting=4, steps=50, last_step_s=0.01)
    left = [*stalls]

    def stalled_s():
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    async def run():
        context = SimpleNamespace(
            engine=SimpleNamespace(stalled_s=stalled_s, stats=lambda: stats), options=ServerOptions(stall_threshold_s=5)
        )
        await asyncio.wait([asyncio.create_task(watch(context, interval_s=0))])

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    return [(record.levelno, record.msg.event, dict(record.msg.fields)) for record in caplog.records]


def test_a_stuck_step_is_reported_once_and_so_is_its_end(caplog):
    stalled = {"running": 3, "waiting": 4, "steps": 50, "last_step_s": 0.01}
    assert _watching([0, 4.9, 5.04, 6, 60, 0.2, 0, 7, 8], caplog) == [
        (logging.ERROR, "stalled", {"seconds": 5.0, **stalled}),
        (logging.WARNING, "moving_again", {}),
        (logging.ERROR, "stalled", {"seconds": 7, **stalled}),
    ]


def test_a_broken_engine_is_reported_in_valid_json(caplog):
    [(level, event, fields)] = _watching([math.inf, math.inf], caplog)
    assert (level, event) == (logging.ERROR, "engine_broken")
    json.dumps(fields, allow_nan=False)


def test_a_running_server_watches_its_engine(start_server, engine, template, caplog):
    with start_server(engine, template, ServerOptions(stall_threshold_s=0.5)):
        engine.stalled = 2.5
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
        events = [record.msg.event for record in caplog.records if record.name.endswith("watchdog")]
        assert events == ["stalled"]


def test_a_step_that_hangs_is_seen_by_probes_metrics_and_the_log(start_server, real, caplog):
    reached, release = threading.Event(), threading.Event()

    def hang(_plan):
        reached.set()
        assert release.wait(20), "nobody let the engine go on"

    real.executor.before_step = hang
    replies = []
    with start_server(real.engine, None, ServerOptions(stall_threshold_s=0.2)) as served:
        assert served.http.get("/health/live").status_code == 200
        post = partial(httpx.post, f"{served.url}/v1/completions", trust_env=False, timeout=20)
        asking = threading.Thread(target=lambda: replies.append(post(json={"prompt": "hi", "max_tokens": 3})))
        asking.start()
        assert reached.wait(10)
        deadline = time.monotonic() + 10
        while not (stalls := _events(caplog, "stalled")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert served.http.get("/health/live").json()["status"] == "stalled"
        assert served.http.get("/health/ready").status_code == 503
        assert served.metric("optimc_step_stalled_seconds") > 0.2
        assert (stalls[0]["running"], stalls[0]["steps"]) == (1, 0)
        release.set()
        asking.join(10)
        assert replies[0].json()["usage"]["completion_tokens"] == 3
        assert served.http.get("/health/live").status_code == 200
        assert len(_events(caplog, "stalled")) == 1


def _events(caplog, event):
    return [record.msg.fields for record in caplog.records if getattr(record.msg, "event", None) == event]


def test_a_step_that_fails_takes_its_requests_and_nothing_else(real, caplog):
    caplog.set_level(logging.INFO)
    ask = {"prompt": "hi", "max_tokens": 8, "temperature": 0}
    before = real.http.post("/v1/completions", json=ask)
    real.fail_in(3)
    failed = real.http.post("/v1/completions", json=ask)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
    assert real.http.get("/health/ready").status_code == 200
    after = real.http.post("/v1/completions", json=ask)
    assert after.json()["choices"] == before.json()["choices"]
    statuses = [(line["status"], line["finish_reason"]) for line in _events(caplog, "request")]
    assert statuses == [(200, "length"), (500, "error"), (200, "length")]


def test_a_whole_answer_out_of_time_is_a_504_and_stops(start_server, engine, template, script, error_of):
    engine.script = script(pieces=["a"] * 1000, delay_s=0.05)
    with start_server(engine, template, ServerOptions(request_timeout_s=0.3)) as served:
        reply = served.complete("hi")
        assert reply.status_code == 504
        error = error_of(reply)
        assert (error["type"], error["code"]) == ("server_error", "request_timeout")
        assert "0.3 s" in error["message"]
        assert engine.submitted[0].aborted.wait(1)
        engine.script = script()
        assert served.complete("hi").status_code == 200, "the connection and the server live on"


def test_a_stream_out_of_time_before_its_first_token_is_a_504(start_server, engine, template, script, error_of):
    engine.script = script(pieces=["a"], delay_s=30)
    with start_server(engine, template, ServerOptions(request_timeout_s=0.2)) as served:
        reply = served.complete("hi", stream=True)
        assert (reply.status_code, error_of(reply)["code"]) == (504, "request_timeout")
        assert engine.submitted[0].aborted.wait(1)


def test_a_stream_out_of_time_ends_with_an_error_event(start_server, engine, template, script, caplog):
    caplog.set_level(logging.INFO)
    engine.script = script(pieces=["a"] * 1000, delay_s=0.05)
    with start_server(engine, template, ServerOptions(request_timeout_s=0.5)) as served:
        reply = served.complete("hi", stream=True)
        assert reply.status_code == 200
        assert b"[DONE]" not in reply.content
        *_, last = reply.text.removesuffix("\n\n").split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert engine.submitted[0].aborted.wait(1)
    [line] = [record.msg.fields for record in caplog.records if record.name == "optimc.requests"]
    assert (line["status"], line["error"], line["finish_reason"]) == (200, "request_timeout", "abort")
    assert not [record for record in caplog.records if record.exc_info], "a timeout is no fault of ours"


def test_a_grammar_that_compiles_for_too_long_is_a_504(start_server, engine, template, error_of):
    engine.compile_s = 1.0
    with start_server(engine, template, ServerOptions(request_timeout_s=0.2)) as served:
        reply = served.complete("hi", guided_regex="[a-z]+")
        assert (reply.status_code, error_of(reply)["code"]) == (504, "request_timeout")
        assert not engine.submitted


def test_responses_are_counted_by_status(served):
    def counts():
        # The answer in hand is counted when it is over.
        return [served.metric(f'optimc_http_responses_total{{status="{status}"}}') for status in (200, 400, 404)]

    def ask():
        served.complete("hi")
        served.complete("hi", n=0)
        served.http.get("/v1/models/none")

    ask()
    ok, bad, missing = counts()
    ask()
    assert counts() == [ok + 4, bad + 1, missing + 1], "the answer, and three looks at the metrics"
