"""The shape of a streamed reply, over every combination a client can ask for."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest

from optimc_runtime.server import ServerOptions

ENDPOINTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 50}),
}
ENDINGS = {
    "eos": {"pieces": ["Hel", "lo"]},
    "stop string": {"pieces": ["Hel", "lo"], "eos": False, "held_back": " END"},
    "length": {"pieces": ["Hel", "lo"], "eos": False, "finish": "length"},
    "one token": {"pieces": [], "held_back": "", "eos": True, "finish": "length"},
    "immediate eos": {"pieces": []},
    "empty increments": {"pieces": ["", "a", "", "b", ""]},
    "unicode": {"pieces": ["é", "\u2028", "😀\x85"]},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_streamed_and_whole_replies_agree(served, script, read_stream, endpoint, usage, n, ending):
    served.engine.script = script(**ENDINGS[ending])
    path, fields = ENDPOINTS[endpoint]
    whole = served.http.post(path, json={**fields, "n": n}).json()
    options = {"stream_options": {"include_usage": True}} if usage else {}
    streamed = read_stream(served, path, {**fields, "n": n, **options})
    assert streamed.error is None
    for choice in whole["choices"]:
        other = streamed.choices[choice["index"]]
        assert other.text == (choice["message"]["content"] if endpoint == "chat" else choice["text"])
        assert other.finish_reason == choice["finish_reason"]
    assert streamed.usage == (whole["usage"] if usage else None)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_error_after_the_first_token_ends_the_stream_in_words(served, script, read_stream, endpoint, usage, n):
    served.engine.script_for = lambda _prompt, nth: script(
        pieces=["a", "b", "c"], fail_after=1 if nth == n - 1 else None, delay_s=0.01
    )
    path, fields = ENDPOINTS[endpoint]
    streamed = read_stream(served, path, {**fields, "n": n, "stream_options": {"include_usage": usage}})
    assert streamed.error == {
        "message": "step 3 failed: injected",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert "data: [DONE]" not in streamed.events
    assert all(choice.text in {"a", "ab", "abc"} for choice in streamed.choices.values())


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_own_status(served, script, error_of, stream):
    served.engine.script = script(fail_after=0)
    refused = served.chat("hi", stream=stream)
    assert refused.status_code == 500
    assert error_of(refused)["code"] == "engine_error"
    served.engine.script = script()
    assert served.chat("hi").status_code == 200


def test_when_one_choice_fails_the_others_are_stopped(served, script):
    served.engine.script_for = lambda _prompt, nth: script(
        pieces=["a"] * 500, delay_s=0.01, fail_after=1 if nth == 1 else None
    )
    started = time.monotonic()
    assert served.chat("hi", n=3).status_code == 500
    assert time.monotonic() - started < 2
    assert all(entry.aborted.wait(2) for entry in served.engine.submitted if entry is not served.engine.submitted[1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_the_engine_gives_up_is_no_success(served, script, error_of, stream):
    served.engine.script = script(pieces=[], eos=False, finish="abort")
    refused = served.chat("hi", stream=stream)
    assert refused.status_code == 503
    assert error_of(refused)["code"] == "aborted"


def test_tokens_are_sent_as_they_come(served, script):
    served.engine.script = script(pieces=["a", "b", "c", "d"], delay_s=0.1)
    arrivals = []
    with served.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as reply:
        started = time.monotonic()
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                arrivals.append(time.monotonic() - started)
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert len(arrivals) == 4
    assert min(gaps) > 0.03, "chunks came in a lump"


def test_no_byte_comes_before_the_first_token(served, script):
    served.engine.script = script(pieces=["a"], delay_s=0.3)
    started = time.monotonic()
    with served.http.stream("POST", "/v1/chat/completions", json={**ENDPOINTS["chat"][1], "stream": True}):
        assert time.monotonic() - started > 0.25


def test_streamed_logprobs_and_ids_equal_the_whole_replys(served, read_stream):
    path, fields = ENDPOINTS["chat"]
    wanted = {**fields, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    [whole] = served.http.post(path, json=wanted).json()["choices"]
    streamed = read_stream(served, path, wanted).choices[0]
    assert streamed.logprobs == whole["logprobs"]
    assert streamed.token_ids == whole["token_ids"]


def test_stream_options_need_a_stream(served, error_of):
    refused = served.chat("hi", stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "stream_options"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_stream_that_takes_too_long_ends_in_words(start_server, engine, template, script, read_stream, endpoint):
    path, fields = ENDPOINTS[endpoint]
    engine.script = script(pieces=["a"] * 1000, delay_s=0.02)
    with start_server(engine, template, ServerOptions(request_timeout_s=1.5)) as served:
        streamed = read_stream(served, path, {**fields, "n": 3})
        assert (streamed.error["code"], streamed.error["type"]) == ("request_timeout", "server_error")
        assert all(entry.aborted.wait(2) for entry in engine.submitted)
        assert any(choice.text for choice in streamed.choices.values())
        assert all(choice.finish_reason is None for choice in streamed.choices.values())
        engine.script = script()
        assert read_stream(served, path, fields).error is None


def test_every_choices_text_is_its_own(served, script, read_stream):
    served.engine.script_for = lambda _prompt, nth: script(pieces=[str(nth)] * 5, delay_s=0.001 * nth)
    streamed = read_stream(served, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert [streamed.choices[index].text for index in range(4)] == ["00000", "11111", "22222", "33333"]
