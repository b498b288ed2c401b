"""What operators look at: models, health, metrics; and how a server starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from functools import partial

import httpx
import pytest

from optimc.errors import ConfigError
from optimc_runtime.server import HttpServer, ServerOptions, build_app, check_address, serve
from optimc_runtime.stats import ProposerStats, SpeculationStats, TenantStats


def test_the_model_is_listed_with_its_length(served):
    [model] = served.http.get("/v1/models").json()["data"]
    assert model["id"] == "scripted"
    assert model["max_model_len"] == 4096
    assert model["object"] == "model"
    assert abs(model["created"] - time.time()) < 3600
    assert served.http.get("/v1/models/scripted").json() == model


def test_a_model_name_may_hold_slashes(engine, template, start_server):
    app = build_app(engine, model_name="org/model-1", chat_template=template)
    server = HttpServer(app, port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            assert client.get("/v1/models/org/model-1").json()["id"] == "org/model-1"
    finally:
        server.stop()
        thread.join(10)


def test_metrics_show_the_engine_as_it_is_now(served):
    for name, value in {
        "optimc_requests_running": 0,
        "optimc_requests_waiting": 2,
        "optimc_kv_usage_ratio": 0.5,
        "optimc_kv_blocks": 10,
        "optimc_kv_cached_blocks": 1,
        "optimc_last_step_seconds": 0.25,
        "optimc_steps_total": 7,
        "optimc_failed_steps_total": 1,
        "optimc_prompt_tokens_total": 11,
        "optimc_prefix_cache_queried_tokens_total": 100,
        "optimc_prefix_cache_hit_tokens_total": 40,
        "optimc_preemptions_total": 3,
        'optimc_step_seconds_total{phase="execute"}': 2,
    }.items():
        assert served.metric(name) == value, name
    before = served.metric("optimc_output_tokens_total")
    served.chat("hi").raise_for_status()
    assert served.metric("optimc_output_tokens_total") == before + 12


def test_metrics_show_what_waits_what_is_cached_and_who_asked(served, monkeypatch):
    figures = replace(
        served.engine.stats(),
        waiting_tokens=700,
        prefix_cached_blocks=6,
        prefix_evicted_blocks=8,
        pinned_blocks=2,
        chunk_budget_tokens=48,
        tenants={"alice": TenantStats(1, 2, 300, 40), "bob": TenantStats(0, 0, 5, 6)},
    )
    monkeypatch.setattr(served.engine, "stats", lambda: figures)
    for name, value in {
        "optimc_waiting_tokens": 700,
        "optimc_prefix_cache_blocks": 6,
        "optimc_prefix_cache_evicted_blocks_total": 8,
        "optimc_prefix_cache_pinned_blocks": 2,
        "optimc_chunk_budget_tokens": 48,
        'optimc_tenant_tokens_total{kind="prompt",tenant="alice"}': 300,
        'optimc_tenant_tokens_total{kind="output",tenant="alice"}': 40,
        'optimc_tenant_tokens_total{kind="output",tenant="bob"}': 6,
    }.items():
        assert served.metric(name) == value, name


def test_metrics_show_what_guessing_brings(served):
    assert "speculation" not in served.http.get("/metrics").text
    assert 'phase="draft"' not in served.http.get("/metrics").text
    served.engine.speculation = SpeculationStats(
        mode="auto",
        is_active=True,
        proposers={"ngram": ProposerStats(10, 6, 4), "medusa": ProposerStats(20, 5, 9)},
        position_drafted=(13, 7),
        position_accepted=(8, 3),
        sequence_steps=30,
        emitted=41,
        draft_s=1.5,
    )
    for name, value in {
        'optimc_speculation_drafted_tokens_total{proposer="ngram"}': 10,
        'optimc_speculation_drafted_tokens_total{proposer="medusa"}': 20,
        'optimc_speculation_accepted_tokens_total{proposer="ngram"}': 6,
        'optimc_speculation_trees_total{proposer="medusa"}': 9,
        'optimc_speculation_position_drafted_total{position="1"}': 13,
        'optimc_speculation_position_accepted_total{position="2"}': 3,
        "optimc_speculation_sequence_steps_total": 30,
        "optimc_speculation_emitted_tokens_total": 41,
        "optimc_speculation_active": 1,
        'optimc_step_seconds_total{phase="draft"}': 5,
    }.items():
        assert served.metric(name) == value, name


def test_metrics_count_outcomes(served, script):
    names = {
        outcome: f'optimc_requests_total{{outcome="{outcome}"}}'
        for outcome in ("stop", "length", "error", "abort", "invalid", "overloaded")
    }
    before = {outcome: served.metric(name) for outcome, name in names.items()}
    served.chat("hi", n=2)
    served.engine.script = script(finish="length", eos=False)
    served.chat("hi", stream=True)
    served.engine.script = script(fail_after=0)
    served.chat("hi")
    served.chat("hi", temperature=-1)
    served.http.post("/v1/chat/completions", content="{")
    served.engine.capacity = 0
    served.chat("hi")
    after = {outcome: served.metric(name) - before[outcome] for outcome, name in names.items()}
    assert after == {"stop": 2, "length": 1, "error": 1, "abort": 0, "invalid": 2, "overloaded": 1}


def test_metrics_time_what_clients_feel(served, script):
    names = [
        "optimc_time_to_first_token_seconds",
        "optimc_time_per_output_token_seconds",
        "optimc_request_duration_seconds",
        "optimc_queue_time_seconds",
        "optimc_prefill_seconds",
    ]
    before = {name: served.metric(f"{name}_sum") for name in names}
    count = {name: served.metric(f"{name}_count") for name in names}
    served.engine.script = script(pieces=["a"] * 4, delay_s=0.1)
    served.chat("hi")
    spent = {name: served.metric(f"{name}_sum") - before[name] for name in names}
    assert all(served.metric(f"{name}_count") == count[name] + 1 for name in names)
    # Five increments of 0.1 s, one token each (four letters and EOS).
    assert 0.09 < spent["optimc_time_to_first_token_seconds"] < 0.3
    assert 0.09 < spent["optimc_time_per_output_token_seconds"] < 0.3
    assert 0.45 < spent["optimc_request_duration_seconds"] < 1.0
    assert 0.09 < spent["optimc_prefill_seconds"] < 0.3
    assert spent["optimc_queue_time_seconds"] < 0.05


def test_two_servers_in_one_process_do_not_share_metrics(served, engine, template, start_server):
    served.chat("hi").raise_for_status()
    with start_server(engine, template, ServerOptions()) as other:
        assert other.metric('optimc_requests_total{outcome="stop"}') == 0


def test_a_taken_port_is_one_clear_error(engine, template):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*choose another"):
            serve(engine, model_name="m", port=port)


def test_a_taken_port_is_known_before_a_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another --port"):
            check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)
    check_address("127.0.0.1", port)


def test_an_address_of_another_machine_is_no_fault_of_the_port():
    with pytest.raises(ConfigError, match="choose another --host"):
        check_address("203.0.113.1", 0)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)])
def test_an_impossible_address_is_one_clear_error(engine, host, port):
    with pytest.raises(ConfigError):
        serve(engine, model_name="m", host=host, port=port)


def test_stopping_finishes_what_runs_and_takes_nothing_new(engine, template, script, start_server):
    engine.script = script(pieces=["a"] * 8, delay_s=0.1)
    results = []
    with start_server(engine, template, ServerOptions()) as served:
        url = served.url
        # A client of its own: the server's is closed before the server is.
        post = partial(httpx.post, f"{url}/v1/chat/completions", trust_env=False, timeout=20)
        running = threading.Thread(
            target=lambda: results.append(post(json={"messages": [{"role": "user", "content": "hi"}]}))
        )
        running.start()
        while not engine.submitted:
            time.sleep(0.01)
    # The server has stopped by now, and it took the answer's time to do so.
    running.join(5)
    assert results[0].json()["choices"][0]["message"]["content"] == "a" * 8
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_draining_gives_up_after_its_time(engine, template, script, start_server):
    engine.script = script(pieces=["a"] * 1000, delay_s=0.05)
    with start_server(engine, template, ServerOptions()) as served:
        connection = served.connect()
        body = b'{"prompt": "a", "stream": true}'
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        assert connection.recv(100)
        started = time.monotonic()
    assert 1.5 < time.monotonic() - started < 6
    assert engine.submitted[0].aborted.wait(1)
    received = b""
    while part := connection.recv(65536):
        received += part
    connection.close()
    assert b"[DONE]" not in received, "a cut answer must not look finished"
    assert b'"code":"aborted"' in received


@pytest.mark.parametrize("method", ["POST /v1/completions", "POST /tokenize"])
def test_a_body_that_is_still_on_its_way_then_is_not_waited_for(engine, template, start_server, caplog, method):
    with start_server(engine, template, ServerOptions()) as served:
        connection = served.connect()
        connection.sendall(f"{method} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        time.sleep(0.1)
        started = time.monotonic()
    assert 1.5 < time.monotonic() - started < 5
    received = b""
    while part := connection.recv(65536):
        received += part
    connection.close()
    assert received.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"aborted"' in received
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_whole_answer_cut_by_the_drain_timeout_says_so(engine, template, script, start_server, caplog):
    engine.script = script(pieces=["a"] * 1000, delay_s=0.05)
    replies = []
    with start_server(engine, template, ServerOptions()) as served:
        post = partial(httpx.post, f"{served.url}/v1/completions", trust_env=False, timeout=20)
        running = threading.Thread(target=lambda: replies.append(post(json={"prompt": "a"})))
        running.start()
        while not engine.submitted:
            time.sleep(0.01)
    running.join(5)
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "aborted"
    assert not [record for record in caplog.records if record.exc_info], "no fault of ours, no traceback"


PROGRAM = """
import sys, threading, time
from optimc_runtime.request import RequestId, RequestOutput, Timings, Usage
from optimc_runtime.server import serve

class Engine:
    max_seq_len, vocab_size, tokenizer = 64, 64, None
    def submit(self, prompt_ids, params, *, on_output, request_id=None, cache_salt="", **_more):
        print("submitted", flush=True)
        def play():
            time.sleep(1.0)
            now = time.monotonic()
            on_output(RequestOutput(RequestId(request_id), (1,), "done", None, "stop", Usage(1, 1, 0), Timings(now)))
        threading.Thread(target=play).start()
        return RequestId(request_id)
    def abort(self, request_id): pass
    def is_healthy(self, threshold_s): return True
    def max_unfinished(self, tenant): return 64
    def stalled_s(self): return 0.0
    def stats(self): raise NotImplementedError

serve(Engine(), model_name="m", port=0, on_ready=lambda url: print("ready", url, flush=True))
print("closed cleanly", flush=True)
"""


def test_a_second_interrupt_ends_at_once_without_a_traceback():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(PROGRAM)
            .replace("sleep(1.0)", "sleep(30)")
            .replace("(target=play)", "(target=play, daemon=True)"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        _, url = process.stdout.readline().split()
        with httpx.Client(base_url=url, trust_env=False) as client:
            post = threading.Thread(target=lambda: _failing(client.post, "/v1/completions", json={"prompt": [1, 2]}))
            post.start()
            assert process.stdout.readline() == "submitted\n"
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=10)
            post.join(10)
        assert process.returncode == 0
        assert "Traceback" not in errors
    finally:
        process.kill()


def _failing(function, *arguments, **options):
    with pytest.raises(httpx.HTTPError):
        function(*arguments, **options).raise_for_status()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_returns_to_the_caller(number):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        assert process.stdout is not None
        word, url = process.stdout.readline().split()
        assert word == "ready"
        replies = []
        post = threading.Thread(
            target=lambda: replies.append(
                httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2]}, timeout=20, trust_env=False)
            )
        )
        post.start()
        assert process.stdout.readline() == "submitted\n"
        process.send_signal(number)
        post.join(20)
        assert replies[0].json()["choices"][0]["text"] == "done"
        assert process.wait(10) == 0
        assert process.stdout.read().strip() == "closed cleanly"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
