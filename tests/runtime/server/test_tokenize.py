"""/tokenize and /detokenize: what the model is given, and what its tokens say."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from optimc_runtime.server import ServerOptions
from optimc_runtime.server.serve import worker_threads


def tokenize(served, **fields):
    return served.http.post("/tokenize", json=fields)


def detokenize(served, **fields):
    return served.http.post("/detokenize", json=fields)


@pytest.mark.parametrize("text", ["", "a", "Grüße, 世界 😀", "a\x00b\u2028", "<3>"])
def test_a_text_comes_back_as_it_went(served, conforms, text):
    there = tokenize(served, prompt=text).json()
    conforms("Tokens", there)
    assert there == {
        "tokens": [16 + byte for byte in text.encode()],
        "count": len(text.encode()),
        "max_model_len": 4096,
    }
    back = detokenize(served, tokens=there["tokens"]).json()
    conforms("TokenText", back)
    assert back == {"prompt": text}


def test_special_tokens_are_spelled_out(served):
    assert detokenize(served, tokens=[1, 16 + ord("a"), 3]).json() == {"prompt": "<1>a<3>"}


def test_a_conversation_is_what_the_model_would_be_given(served):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    tokens = tokenize(served, messages=messages).json()["tokens"]
    served.http.post("/v1/chat/completions", json={"messages": messages}).raise_for_status()
    assert served.engine.submitted[0].prompt == tokens


@pytest.mark.parametrize(("given", "wanted"), [({}, True), ({"add_special_tokens": False}, False)])
def test_the_tokenizers_own_tokens_may_be_left_out(start_server, engine, monkeypatch, given, wanted):
    asked = []
    encode = engine.tokenizer.encode
    monkeypatch.setattr(
        engine.tokenizer,
        "encode",
        lambda text, *, add_special_tokens=True: asked.append(add_special_tokens) or encode(text),
    )
    with start_server(engine, None, ServerOptions()) as served:
        tokenize(served, prompt="a", **given).raise_for_status()
    assert asked == [wanted]


REFUSED = {
    "nothing": (tokenize, {}, "prompt"),
    "both": (tokenize, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
    "ids": (tokenize, {"prompt": [1, 2]}, "prompt"),
    "no messages": (tokenize, {"messages": []}, "prompt"),
    "odd message": (tokenize, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    "messages with the tokenizer's tokens": (
        tokenize,
        {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": False},
        "add_special_tokens",
    ),
    "unknown": (tokenize, {"prompt": "a", "temperature": 1}, "temperature"),
    "far too long": (tokenize, {"prompt": "word " * 100_000}, "prompt"),
    "no tokens": (detokenize, {}, "tokens"),
    "text": (detokenize, {"tokens": "a"}, "tokens"),
    "words": (detokenize, {"tokens": ["a"]}, "tokens.0"),
    "outside": (detokenize, {"tokens": [20, 272]}, "tokens"),
    "negative": (detokenize, {"tokens": [-1]}, "tokens"),
    "far too many": (detokenize, {"tokens": [20] * 200_000}, "tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_words(served, error_of, name):
    call, fields, param = REFUSED[name]
    refused = call(served, **fields)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == param
    assert "Value error" not in error_of(refused)["message"]


def test_another_model_is_not_found(served, error_of):
    assert tokenize(served, model="other", prompt="a").status_code == 404
    assert detokenize(served, model="other", tokens=[20]).status_code == 404


def test_a_plan_without_tokenizer_says_so(start_server, engine, error_of):
    engine.tokenizer = None
    with start_server(engine, None, ServerOptions()) as served:
        for refused in (tokenize(served, prompt="a"), detokenize(served, tokens=[20])):
            assert refused.status_code == 400
            assert "no tokenizer" in error_of(refused)["message"]


def test_nothing_is_generated(served):
    tokenize(served, prompt="a").raise_for_status()
    detokenize(served, tokens=[20]).raise_for_status()
    assert served.engine.submitted == []


def test_many_texts_at_once_take_few_threads(served, monkeypatch):
    encode = served.engine.tokenizer.encode
    at_once: list[int] = []
    running = threading.Semaphore(0)

    def slow_encode(text, **options):
        running.release()
        time.sleep(0.02)
        at_once.append(running._value)
        running.acquire()
        return encode(text, **options)

    monkeypatch.setattr(served.engine.tokenizer, "encode", slow_encode)
    with ThreadPoolExecutor(30) as clients:
        replies = list(clients.map(lambda number: tokenize(served, prompt=f"text {number}"), range(60)))
    assert all(reply.status_code == 200 for reply in replies)
    assert 1 < max(at_once) <= worker_threads()
