"""Bodies too large or too slow, queues too full, connections that ask nothing."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from optimc_runtime.server import ServerOptions
from optimc_runtime.server.connection import DeadlineProtocol
from optimc_runtime.server.keys import KeyRing

MIB = 1024 * 1024


def response_of(connection: socket.socket) -> tuple[int, dict]:
    """Read one response to the end of the connection."""
    data = b""
    while True:
        received = connection.recv(65536)
        if not received:
            break
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("size_mib", [9, 100])
def test_a_large_body_is_refused_by_its_declared_size_before_it_is_sent(served, error_of, size_mib):
    with served.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            + f"Content-Length: {size_mib * MIB}\r\n\r\n".encode()
        )
        started = time.monotonic()
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        assert time.monotonic() - started < 0.5


def test_a_client_that_sends_100_mb_first_still_reads_its_413(served, error_of):
    pieces = (b"x" * 1_000_000 for _ in range(100))
    reply = served.http.post("/v1/completions", content=pieces, headers={"content-length": "100000000"})
    assert reply.status_code == 413
    assert "8,388,608" in error_of(reply)["message"]
    assert served.chat("hi").status_code == 200


def test_an_undeclared_large_body_is_refused_while_it_is_sent(served, error_of):
    def pieces():
        for _ in range(40):
            yield b"x" * MIB

    reply = served.http.post("/v1/completions", content=pieces())
    assert reply.status_code == 413
    error_of(reply)
    assert served.chat("hi").status_code == 200


def test_the_limit_is_exact(start_server, engine, template):
    body = json.dumps({"prompt": "a" * 900}).encode()
    padded = body + b" " * (1000 - len(body))
    with start_server(engine, template, ServerOptions(max_body_bytes=1000)) as served:
        assert served.http.post("/v1/completions", content=padded).status_code == 200
        assert served.http.post("/v1/completions", content=padded + b" ").status_code == 413


def test_a_body_that_never_ends_is_given_up(start_server, engine, template):
    with (
        start_server(engine, template, ServerOptions(body_timeout_s=0.3)) as served,
        served.connect() as connection,
    ):
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n{"
        )
        status, body = response_of(connection)
        assert status == 408
        assert body["error"]["code"] == "body_timeout"
        assert served.chat("hi").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_a_connection_that_asks_nothing_is_closed(start_server, engine, template, monkeypatch, sent):
    monkeypatch.setattr(DeadlineProtocol, "header_timeout_s", 0.4)
    with start_server(engine, template, ServerOptions()) as served, served.connect() as connection:
        started = time.monotonic()
        connection.sendall(sent)
        dripping = threading.Thread(target=_drip, args=(connection,))
        dripping.start()
        while connection.recv(1000):
            pass
        assert 0.2 < time.monotonic() - started < 3
        dripping.join()
        assert served.chat("hi").status_code == 200


def _drip(connection: socket.socket) -> None:
    for _ in range(40):
        try:
            connection.sendall(b"x")
        except OSError:
            return
        time.sleep(0.05)


def test_a_slow_answer_is_not_mistaken_for_a_slow_question(start_server, engine, template, script, monkeypatch):
    monkeypatch.setattr(DeadlineProtocol, "header_timeout_s", 0.2)
    engine.script = script(pieces=["a"] * 5, delay_s=0.1)
    with start_server(engine, template, ServerOptions()) as served:
        for _ in range(2):  # the second request comes over the same connection
            assert served.chat("hi").json()["choices"][0]["message"]["content"] == "aaaaa"


def test_a_full_queue_is_429_at_once_and_what_was_accepted_finishes(served, script, error_of):
    served.engine.capacity = 4
    served.engine.script = script(delay_s=0.2)

    def post(_: int) -> tuple[float, object]:
        started = time.monotonic()
        reply = served.chat("hi")
        return time.monotonic() - started, reply

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(post, range(12)))
    refused = [(elapsed_s, reply) for elapsed_s, reply in results if reply.status_code == 429]
    answered = [reply for _, reply in results if reply.status_code == 200]
    assert len(refused) + len(answered) == 12
    assert len(answered) >= 4
    assert refused
    first_answer_s = min(elapsed_s for elapsed_s, reply in results if reply.status_code == 200)
    for elapsed_s, reply in refused:
        assert elapsed_s < first_answer_s
        assert reply.headers["retry-after"] == "1"
        error = error_of(reply)
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert all(reply.json()["choices"][0]["message"]["content"] == "Hello world" for reply in answered)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_fit_are_withdrawn_when_one_does_not(served, script, stream):
    served.engine.capacity = 2
    served.engine.script = script(pieces=["a"] * 1000, delay_s=0.02)
    assert served.chat("hi", n=3, stream=stream).status_code == 429
    assert len(served.engine.submitted) == 2
    assert all(entry.aborted.wait(1) for entry in served.engine.submitted)


@pytest.fixture
def unread(start_server, engine, template, script, monkeypatch):
    """A connection that asked for 0.5 MB, and 0.1 MB at most of room for it on the way."""

    def connection_made(protocol, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        made(protocol, transport)

    made = DeadlineProtocol.connection_made
    monkeypatch.setattr(DeadlineProtocol, "connection_made", connection_made)
    monkeypatch.setattr(DeadlineProtocol, "read_timeout_s", 1.0)
    engine.script = script(pieces=["a" * 100] * 30)
    body = b'{"prompt": "a", "stream": true, "logprobs": 5, "max_tokens": 3000}'
    with start_server(engine, template, ServerOptions()) as served, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        connection.connect(served.address)
        connection.settimeout(20)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        yield connection


def test_a_client_that_does_not_read_is_cut_off(unread, caplog):
    caplog.set_level("INFO", logger="optimc.requests")
    deadline = time.monotonic() + 20
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.05)
    assert caplog.records, "the reply still waits for its reader"
    received = b""
    with suppress(ConnectionResetError):
        while part := unread.recv(65536):
            received += part
    assert b"[DONE]" not in received


def test_a_slow_reader_gets_everything(unread):
    received = b""
    started = time.monotonic()
    while part := unread.recv(4 * 1024):
        received += part
        if time.monotonic() - started < 3.0:  # longer than a client may read nothing, and never caught up
            time.sleep(0.1)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"data: [DONE]\n\n" in received


def test_more_answers_than_would_ever_be_taken_in_are_no_overload(start_server, engine, template):
    ring = KeyRing.from_text("small:small-0123456789abcdef")
    headers = {"Authorization": "Bearer small-0123456789abcdef"}
    with start_server(engine, template, ServerOptions(), keys=ring) as served:
        body = {"prompt": ["a", "b", "c"], "n": 3, "max_tokens": 1}
        assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        refused = served.http.post("/v1/completions", json={**body, "n": 4}, headers=headers)
        assert refused.status_code == 400
        assert "3 prompts with n=4 are 12 answers; this server gives at most 10" in refused.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "a"}], "n": 11}
        assert served.http.post("/v1/chat/completions", json=chat, headers=headers).status_code == 400
