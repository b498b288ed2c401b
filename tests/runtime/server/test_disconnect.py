"""A client that goes away takes its work with it, whatever state that is in."""

from __future__ import annotations

import json
import socket
import struct
import time

import pytest


def request_bytes(path: str, fields: dict) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def wait_for(condition, seconds: float = 3.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def leave_politely(connection: socket.socket) -> None:
    connection.close()


def leave_by_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [leave_politely, leave_by_reset])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_aborts_every_choice(served, script, stream, n, leave):
    served.engine.script = script(pieces=["a"] * 100, delay_s=5.0)
    connection = served.connect()
    connection.sendall(request_bytes("/v1/chat/completions", {**CHAT, "stream": stream, "n": n}))
    assert wait_for(lambda: len(served.engine.submitted) == n)
    leave(connection)
    assert wait_for(lambda: all(entry.aborted.is_set() for entry in served.engine.submitted))
    assert wait_for(lambda: not served.engine.live())


@pytest.mark.parametrize("leave", [leave_politely, leave_by_reset])
@pytest.mark.parametrize("n", [1, 4])
def test_leaving_after_the_first_token_stops_the_stream(served, script, n, leave):
    served.engine.script = script(pieces=["a"] * 1000, delay_s=0.02)
    connection = served.connect()
    connection.sendall(request_bytes("/v1/chat/completions", {**CHAT, "stream": True, "n": n}))
    received = b""
    while b'"content":"a"' not in received:
        received += connection.recv(65536)
    leave(connection)
    assert wait_for(lambda: not served.engine.live())
    sent = [entry.sent_tokens for entry in served.engine.submitted]
    assert len(sent) == n
    assert max(sent) < 500
    time.sleep(0.1)
    assert [entry.sent_tokens for entry in served.engine.submitted] == sent, "tokens went on after the abort"


def test_leaving_in_the_middle_of_a_whole_reply_aborts_it(served, script):
    served.engine.script = script(pieces=["a"] * 1000, delay_s=0.02)
    with served.connect() as connection:
        connection.sendall(request_bytes("/v1/completions", {"prompt": ["a", "b"], "n": 2}))
        assert wait_for(lambda: sum(entry.sent_tokens for entry in served.engine.submitted) > 8)
    assert wait_for(lambda: not served.engine.live())
    assert len(served.engine.submitted) == 4


@pytest.mark.parametrize("part", ["POST /v1/chat/completions HTTP/1.1\r\n", "headers", "half a body"])
def test_leaving_before_the_request_is_complete_starts_nothing(served, part):
    whole = request_bytes("/v1/chat/completions", CHAT)
    cut = {"headers": whole.index(b"\r\n\r\n") + 4, "half a body": len(whole) - 10}.get(part)
    with served.connect() as connection:
        connection.sendall(part.encode() if cut is None else whole[:cut])
        time.sleep(0.05)
    time.sleep(0.1)
    assert served.engine.submitted == []
    assert served.chat("hi").status_code == 200


def test_a_finished_request_is_not_aborted(served):
    served.chat("hi", n=2).raise_for_status()
    served.chat("hi", stream=True).raise_for_status()
    assert wait_for(lambda: not served.engine.live())
    assert not any(entry.aborted.is_set() for entry in served.engine.submitted)


def test_aborts_are_counted(served, script):
    before = served.metric('optimc_requests_total{outcome="abort"}')
    served.engine.script = script(pieces=["a"] * 100, delay_s=5.0)
    connection = served.connect()
    connection.sendall(request_bytes("/v1/chat/completions", {**CHAT, "n": 3}))
    assert wait_for(lambda: len(served.engine.submitted) == 3)
    connection.close()
    assert wait_for(lambda: served.metric('optimc_requests_total{outcome="abort"}') == before + 3)
    assert wait_for(lambda: not served.engine.live())
    assert served.metric('optimc_requests_total{outcome="abort"}') == before + 3


def test_many_clients_leaving_at_random_leave_nothing_behind(served, script):
    served.engine.script = script(pieces=["a"] * 400, delay_s=0.01)
    connections = []
    for number in range(40):
        connection = served.connect()
        connection.sendall(request_bytes("/v1/chat/completions", {**CHAT, "stream": number % 2 == 0}))
        connections.append(connection)
    for number, connection in enumerate(connections):
        time.sleep(0.002 * (number % 3))
        (leave_politely, leave_by_reset)[number % 2](connection)
    assert wait_for(lambda: not served.engine.live(), 6)
    served.engine.script = script()
    assert served.chat("hi").status_code == 200
