"""A client that goes away takes its work with it, whatever state that is in."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import pytest

from optimc_runtime.server import ServerOptions


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


def asked_for_a_grammar(served) -> dict:
    served.engine.compile_s = 0.4
    return {**CHAT, "guided_regex": "[a-z]+"}


def asked_in_words_that_take_time(served) -> dict:
    encode = served.engine.tokenizer.encode
    served.engine.tokenizer.encode = lambda text, **options: time.sleep(0.4) or encode(text, **options)
    return CHAT


@pytest.mark.parametrize("prepare", [asked_for_a_grammar, asked_in_words_that_take_time])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_the_request_is_made_ready_starts_nothing(start_server, engine, template, prepare, stream):
    """Threads cannot be stopped, but what they made ready for nobody need not be computed."""
    with start_server(engine, template, ServerOptions()) as served:
        fields = prepare(served)
        with served.connect() as connection:
            connection.sendall(request_bytes("/v1/chat/completions", {**fields, "stream": stream}))
            time.sleep(0.1)
        time.sleep(0.8)
        assert engine.submitted == []
        assert len(engine.compiled) == (prepare is asked_for_a_grammar)
        assert served.chat("hi").status_code == 200


class Held:
    """Holds a real engine at the first step that is `when(plan)`, until `go`; counts the server's aborts."""

    def __init__(self, real, when) -> None:
        self._real = real
        self._when = when
        self._gone = threading.Event()
        self.reached = threading.Event()
        self.aborts = 0
        abort = real.engine.abort

        def counted(request_id) -> None:
            abort(request_id)
            self.aborts += 1

        real.engine.abort = counted
        real.executor.before_step = self

    def __call__(self, plan) -> None:
        if not self.reached.is_set() and self._when(plan):
            self.reached.set()
            assert self._gone.wait(20), "nobody let the engine go on"

    def go(self) -> None:
        self._gone.set()


def connect(real) -> socket.socket:
    host, port = real.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def ask(real, **fields) -> socket.socket:
    connection = connect(real)
    connection.sendall(request_bytes("/v1/completions", {"temperature": 0, "ignore_eos": True, **fields}))
    return connection


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_in_the_middle_of_the_prompt_frees_it_within_two_steps(start_real, stream, n):
    with start_real(max_step_tokens=8, max_seqs=4) as real:
        held = Held(real, lambda plan: plan.positions.max() >= 20)
        connection = ask(real, prompt=[7] * 60, max_tokens=20, n=n, stream=stream)
        assert held.reached.wait(10)
        connection.close()
        assert wait_for(lambda: held.aborts == n)
        steps = real.engine.stats().steps
        held.go()
        real.check_idle()
        assert real.engine.stats().steps <= steps + 2
        assert real.engine.stats().output_tokens == 0


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue_costs_nothing(start_real, stream, n):
    with start_real(max_seqs=1) as real:
        held = Held(real, lambda plan: plan.positions.max() > 60)
        first = ask(real, prompt=[7] * 60, max_tokens=8)
        assert held.reached.wait(10)
        connection = ask(real, prompt=[8] * 50, max_tokens=20, n=n, stream=stream)
        assert wait_for(lambda: real.engine.stats().waiting == n)
        connection.close()
        assert wait_for(lambda: held.aborts == n)
        held.go()
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        first.close()
        real.check_idle()
        stats = real.engine.stats()
        assert (stats.prompt_tokens, stats.output_tokens) == (60, 8)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_preempted_frees_everything(start_real, stream):
    with start_real(num_blocks=16) as real:
        all_there = threading.Event()  # else the first may have ended before the last has come
        held = Held(real, lambda _plan: all_there.wait(10) and real.engine.stats().preemptions > 0)
        connections = [ask(real, prompt=[7 + i] * 16, max_tokens=40, stream=stream) for i in range(3)]
        assert wait_for(lambda: real.engine.stats().running + real.engine.stats().waiting == 3)
        all_there.set()
        assert held.reached.wait(10)
        assert real.engine.stats().waiting > 0
        for connection in connections:
            connection.close()
        assert wait_for(lambda: held.aborts == 3)
        held.go()
        real.check_idle()
        assert real.engine.stats().output_tokens < 3 * 40


@pytest.mark.parametrize("leave", [leave_politely, leave_by_reset])
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_a_finished_answer_unread_hurts_nobody(real, stream, leave):
    connection = ask(real, prompt=[7] * 16, max_tokens=10, stream=stream)
    assert wait_for(lambda: real.engine.stats().finished["length"] == 1)
    leave(connection)
    real.check_idle()
    with ask(real, prompt=[7] * 16, max_tokens=10) as another:
        assert another.recv(100).startswith(b"HTTP/1.1 200")
