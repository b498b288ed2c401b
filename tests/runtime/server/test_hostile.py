"""No body, however broken, gets anything but an error object, quickly, and none of them hurts the next request."""

from __future__ import annotations

import json
import threading
import time

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
KWARGS = "chat_template_kwargs"


def chat(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})


def text(**fields):
    return json.dumps({"prompt": "hi", **fields})


def message(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "hi", **fields}]})


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

# name: (path, body, param of the error or None)
REFUSED = {
    "empty body": (CHAT, "", None),
    "not json": (CHAT, "{'model': 1}", None),
    "cut off": (CHAT, '{"messages": [', None),
    "trailing garbage": (TEXT, text() + "}", None),
    "an array": (TEXT, "[1, 2]", None),
    "a string": (TEXT, '"hi"', None),
    "null": (TEXT, "null", None),
    "NaN literal": (TEXT, '{"prompt": "a", "temperature": NaN}', None),
    "Infinity literal": (TEXT, '{"prompt": "a", "temperature": Infinity}', None),
    "overflowing number": (TEXT, '{"prompt": "a", "temperature": 1e999}', "temperature"),
    "overflowing bias": (TEXT, '{"prompt": "a", "logit_bias": {"20": 1e999}}', "logit_bias"),
    "a million digits": (TEXT, '{"prompt": "a", "seed": ' + "9" * 1_000_000 + "}", None),
    "100k-deep arrays": (TEXT, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
    "100k-deep objects": (CHAT, '{"messages": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}", None),
    "lone high surrogate": (TEXT, '{"prompt": "a\\ud800b"}', None),
    "lone low surrogate": (CHAT, '{"messages": [{"role": "user", "content": "\\udc00"}]}', None),
    "surrogate in a key": (TEXT, '{"prompt": "a", "\\ud800": 1}', None),
    "invalid utf-8": (TEXT, b'{"prompt": "\xff\xfe"}', None),
    "utf-16": (TEXT, text().encode("utf-16"), None),
    "no messages": (CHAT, "{}", "messages"),
    "empty messages": (CHAT, chat(messages=[]), "messages"),
    "messages as text": (CHAT, chat(messages="hi"), "messages"),
    "message as text": (CHAT, chat(messages=["hi"]), "messages.0"),
    "no role": (CHAT, chat(messages=[{"content": "hi"}]), "messages.0.role"),
    "odd role": (CHAT, message(role="robot"), "messages.0.role"),
    "a tool's answer to nothing": (CHAT, message(role="tool"), "messages.0.tool_call_id"),
    "calls without ids": (CHAT, message(role="assistant", tool_calls=[{}]), "messages.0.tool_calls.0.id"),
    "tools the template has no place for": (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        "tools",
    ),
    "unknown response format": (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    "two grammars": (TEXT, text(grammar="start: /a/", guided_regex="a"), "grammar"),
    "no content": (CHAT, message(content=None), "messages.0.content"),
    "content number": (CHAT, message(content=3), "messages.0.content"),
    "image part": (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages.0.content"),
    "text then audio": (
        CHAT,
        message(content=[{"type": "text", "text": "a"}, {"type": "input_audio"}]),
        "messages.0.content",
    ),
    "part without text": (CHAT, message(content=[{"type": "text"}]), "messages.0.content"),
    "part as text": (CHAT, message(content=["a"]), "messages.0.content"),
    "part with more": (CHAT, message(content=[{"type": "text", "text": "a", "x": 1}]), "messages.0.content"),
    "message with unknown field": (CHAT, message(weight=1), "messages.0.weight"),
    "more messages than tokens": (CHAT, chat(messages=[{"role": "user", "content": ""}] * 5000), "messages"),
    "no prompt": (TEXT, "{}", "prompt"),
    "empty prompt": (TEXT, text(prompt=""), "prompt"),
    "empty prompt list": (TEXT, text(prompt=[]), "prompt"),
    "empty id list": (TEXT, text(prompt=[[]]), "prompt"),
    "prompt number": (TEXT, text(prompt=3), "prompt"),
    "prompt object": (TEXT, text(prompt={"a": 1}), "prompt"),
    "mixed prompts": (TEXT, text(prompt=["a", 3]), "prompt"),
    "mixed ids": (TEXT, text(prompt=[[1, "a"]]), "prompt"),
    "boolean ids": (TEXT, text(prompt=[True, False]), "prompt"),
    "fractional ids": (TEXT, text(prompt=[1.5, 2.5]), "prompt"),
    "negative id": (TEXT, text(prompt=[20, -1]), "prompt"),
    "id outside the vocabulary": (TEXT, text(prompt=[20, 272]), "prompt"),
    "huge id": (TEXT, text(prompt=[10**30]), "prompt"),
    "prompt too long": (TEXT, text(prompt=[20] * 5000), "prompt"),
    "giant text prompt": (TEXT, text(prompt="word " * 1_500_000), "prompt"),
    "giant chat prompt": (CHAT, message(content="word " * 1_500_000), "messages"),
    "a million wrong ids": (TEXT, text(prompt=[20] * 1_000_000 + ["x"]), "prompt"),
    "100k template variables": (CHAT, chat(chat_template_kwargs={f"k{n}": 1 for n in range(100_000)}), KWARGS),
    "50k nested variables": (CHAT, chat(chat_template_kwargs={"a": [[[]] * 1000] * 50}), KWARGS),
    "200k messages": (CHAT, chat(messages=[{"role": "user", "content": ""}] * 200_000), "messages"),
    "100k calls": (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 128}] * 800), "messages"),
    "300k prompts": (TEXT, text(prompt=[[1]] * 300_000), "prompt"),
    "9k wrong messages": (CHAT, chat(messages=[{}] * 9_000), "messages.0.role"),
    "100k biases": (
        TEXT,
        text(logit_bias={str(i): 0.0 for i in range(100_000)} | {"x": 1}),
        "logit_bias",
    ),
    "a million stops": (TEXT, text(stop=[1] * 1_000_000), "stop.0"),
    "temperature -1": (TEXT, text(temperature=-1), "temperature"),
    "temperature 1e9": (TEXT, text(temperature=1e9), "temperature"),
    "temperature as text": (TEXT, text(temperature="0.5"), "temperature"),
    "temperature true": (TEXT, text(temperature=True), "temperature"),
    "top_p -1": (TEXT, text(top_p=-1), "top_p"),
    "top_p 0": (TEXT, text(top_p=0), "top_p"),
    "top_p that float32 rounds to 0": (TEXT, text(top_p=1e-320), "top_p"),
    "repetition_penalty that float32 rounds to 0": (TEXT, text(repetition_penalty=1e-320), "repetition_penalty"),
    "top_p 2": (TEXT, text(top_p=2), "top_p"),
    "top_k -1": (TEXT, text(top_k=-1), "top_k"),
    "min_p 2": (TEXT, text(min_p=2), "min_p"),
    "repetition_penalty 0": (TEXT, text(repetition_penalty=0), "repetition_penalty"),
    "presence_penalty 3": (TEXT, text(presence_penalty=3), "presence_penalty"),
    "frequency_penalty -3": (TEXT, text(frequency_penalty=-3), "frequency_penalty"),
    "n 0": (TEXT, text(n=0), "n"),
    "n 10000": (TEXT, text(n=10_000), "n"),
    "n as text": (TEXT, text(n="1"), "n"),
    "n times prompts": (TEXT, text(prompt=["a"] * 20, n=20), "n"),
    "max_tokens -1": (TEXT, text(max_tokens=-1), "max_tokens"),
    "max_tokens 0": (TEXT, text(max_tokens=0), "max_tokens"),
    "max_tokens fraction": (TEXT, text(max_tokens=1.5), "max_tokens"),
    "max_tokens 1e18": (TEXT, text(max_tokens=10**18), None),
    "max_completion_tokens 0": (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    "max_completion_tokens in completions": (TEXT, text(max_completion_tokens=3), "max_completion_tokens"),
    "min_tokens above max_tokens": (TEXT, text(min_tokens=9, max_tokens=3), "min_tokens"),
    "seed too large": (TEXT, text(seed=2**64), "seed"),
    "seed fraction": (TEXT, text(seed=0.5), "seed"),
    "five stops": (TEXT, text(stop=list("abcde")), "stop"),
    "empty stop": (TEXT, text(stop=""), "stop"),
    "giant stop": (TEXT, text(stop="x" * 5_000_000), "stop"),
    "stop number": (TEXT, text(stop=3), "stop"),
    "bias of a word": (TEXT, text(logit_bias={"the": 1}), "logit_bias"),
    "bias of a negative id": (TEXT, text(logit_bias={"-1": 1}), "logit_bias"),
    "bias outside the vocabulary": (TEXT, text(logit_bias={"272": 1}), "logit_bias"),
    "bias out of range": (TEXT, text(logit_bias={"20": 101}), "logit_bias"),
    "bias as text": (TEXT, text(logit_bias={"20": "1"}), "logit_bias"),
    "bias list": (TEXT, text(logit_bias=[1]), "logit_bias"),
    "logprobs true in completions": (TEXT, text(logprobs=True), "logprobs"),
    "logprobs 21": (TEXT, text(logprobs=21), "logprobs"),
    "logprobs number in chat": (CHAT, chat(logprobs=3), "logprobs"),
    "top_logprobs alone": (CHAT, chat(top_logprobs=3), "top_logprobs"),
    "top_logprobs 21": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    "stop_token_ids outside": (TEXT, text(stop_token_ids=[999]), "stop_token_ids"),
    "stream as text": (TEXT, text(stream="yes"), "stream"),
    "stream_options list": (TEXT, text(stream=True, stream_options=[1]), "stream_options"),
    "unknown stream option": (TEXT, text(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "cache_salt number": (TEXT, text(cache_salt=3), "cache_salt"),
    "cache_salt giant": (TEXT, text(cache_salt="x" * 1000), "cache_salt"),
    "model number": (TEXT, text(model=3), "model"),
    "braces in a name": (TEXT, text(**{"{text}{0}": 1}), "{text}{0}"),
    "giant name": (TEXT, text(**{"x" * 1_000_000: 1}), "x" * 80),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_words_and_at_once(served, error_of, name):
    path, body, param = REFUSED[name]
    data = body if isinstance(body, bytes) else body.encode()
    elapsed_s = 1.0
    for _ in range(3):  # a busy machine may spoil one try, a slow server spoils all
        started = time.monotonic()
        reply = served.http.post(path, content=data, headers={"content-type": "application/json"})
        elapsed_s = min(elapsed_s, time.monotonic() - started)
        if elapsed_s < 1.0:
            break
    assert reply.status_code == 400, reply.text[:300]
    error = error_of(reply)
    assert error["param"] == param
    assert len(error["message"]) < 1100
    assert elapsed_s < 1.0
    assert served.engine.submitted == []
    assert served.complete("still there?").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/index.html", 404),
        ("GET", "/page/../serve.py", 404),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/models/", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/%ff%00", 404),
    ],
)
def test_wrong_paths_and_methods_get_error_objects(served, error_of, method, path, status):
    reply = served.http.request(method, path)
    assert reply.status_code == status
    error_of(reply)
    if status == 405:
        assert reply.headers["allow"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_not_found(served, error_of, path):
    reply = served.http.post(path, json={"model": "gpt-9", "what": "ever"})
    assert reply.status_code == 404
    assert error_of(reply)["code"] == "model_not_found"


def test_nul_and_odd_characters_are_text_like_any_other(served):
    for prompt in ("\x00", "a\x00b", "\u2028", "\ufffd", "\U0001f469\u200d\U0001f469", "\u202eabc"):
        assert served.complete(prompt).status_code == 200


def test_a_repeated_key_counts_once(served):
    reply = served.http.post(TEXT, content=b'{"prompt": "a", "seed": 1, "seed": 2}')
    assert reply.status_code == 200
    assert served.engine.submitted[0].params.seed == 2


def test_a_failure_of_our_own_is_a_500_that_tells_no_secrets(served, error_of):
    served.engine.submit_raises = RuntimeError("secret path /etc")
    reply = served.chat("hi")
    assert reply.status_code == 500
    assert "secret" not in error_of(reply)["message"]
    served.engine.submit_raises = None
    assert served.chat("hi").status_code == 200


def test_too_many_stops_are_quoted_as_they_were_sent(served, error_of):
    assert "got ['a', 'b', 'c', 'd', 'e']" in error_of(served.chat("hi", stop=list("abcde")))["message"]


def test_broken_http_is_refused_and_hurts_nobody(served):
    for garbage in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
        with served.connect() as connection:
            connection.sendall(garbage + b"\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert served.chat("hi").status_code == 200


def test_a_parallel_stream_keeps_its_pace_under_hostile_bodies(served, script):
    served.engine.script_for = lambda prompt, _nth: script(pieces=["x"] * 60, delay_s=0.02)
    stop = threading.Event()

    def attack():
        names = ("giant text prompt", "100k-deep arrays", "a million wrong ids", "giant stop", "200k messages")
        while not stop.is_set():
            for name in names:
                path, body, _ = REFUSED[name]
                served.http.post(path, content=body.encode())

    attacker = threading.Thread(target=attack)
    gaps = []
    with served.http.stream("POST", TEXT, json={"prompt": "x", "stream": True}) as reply:
        attacker.start()
        last = time.monotonic()
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
    stop.set()
    attacker.join()
    assert len(gaps) == 61
    assert max(gaps) < 1.0
    assert sorted(gaps)[len(gaps) // 2] < 0.2
