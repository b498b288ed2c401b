"""The official client, in its strict mode, against a real server on a real engine with a scripted model."""

from __future__ import annotations

import logging
import threading
import time
from itertools import product
from typing import Any

import numpy as np
import openai
import pytest

from .real_server import EOS_TEXT, RealServer


def ask(real: RealServer, endpoint: str, **fields: Any) -> Any:
    """Call the endpoint with the shared fields: greedy, letters only."""
    bias = {**real.letters_only(), **fields.pop("logit_bias", {})}
    common: dict[str, Any] = {"model": "tiny", "temperature": 0, "logit_bias": bias, **fields}
    if endpoint == "chat":
        return real.client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], **common)
    # The client's type for text chunks has no null finish_reason, although the API sends it in all but the last.
    client = real.lenient_client if fields.get("stream") else real.client
    return client.completions.create(prompt="hello", **common)


def texts_and_reasons(choices: Any) -> list[tuple[str, str]]:
    return [
        (choice.message.content if hasattr(choice, "message") else choice.text, choice.finish_reason)
        for choice in sorted(choices, key=lambda choice: choice.index)
    ]


def gather(stream: Any, n: int) -> tuple[list[tuple[str, str]], Any]:
    """Put a stream's choices together; return them with the usage of the last chunk."""
    texts = dict.fromkeys(range(n), "")
    reasons: dict[int, str] = {}
    usage = None
    for chunk in stream:
        assert usage is None, "usage is the last chunk"
        for choice in chunk.choices:
            assert choice.index not in reasons, "nothing follows the finish reason"
            texts[choice.index] += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            if choice.finish_reason is not None:
                reasons[choice.index] = choice.finish_reason
        if chunk.usage is not None:
            assert chunk.choices == []
            usage = chunk.usage
    return [(texts[index], reasons[index]) for index in range(n)], usage


@pytest.mark.parametrize("ending", ["eos", "stop string", "length", "one token", "immediate eos"])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_streamed_and_whole_answers_agree_for_every_ending(real, endpoint, ending):
    forced_eos = {"logit_bias": {str(real.eos): 100}, "max_tokens": 20}
    plain = ask(real, endpoint, max_tokens=12)
    [(full_text, _)] = texts_and_reasons(plain.choices)
    assert len(full_text) == 12
    fields, expected = {
        "eos": ({**forced_eos, "extra_body": {"min_tokens": 3}}, (full_text[:3], "stop")),
        "stop string": (
            {"stop": [full_text[4:6]], "max_tokens": 12},
            (full_text[: full_text.index(full_text[4:6])], "stop"),
        ),
        "length": ({"max_tokens": 5}, (full_text[:5], "length")),
        "one token": ({"max_tokens": 1}, (full_text[:1], "length")),
        "immediate eos": (forced_eos, ("", "stop")),
    }[ending]
    for n, usage in product([1, 3], [False, True]):
        whole = ask(real, endpoint, n=n, **fields)
        assert texts_and_reasons(whole.choices) == [expected] * n
        options = {"stream_options": {"include_usage": True}} if usage else {}
        streamed, counted = gather(ask(real, endpoint, n=n, stream=True, **options, **fields), n)
        assert streamed == [expected] * n
        if usage:
            assert counted.completion_tokens == whole.usage.completion_tokens
            assert counted.prompt_tokens == whole.usage.prompt_tokens
        else:
            assert counted is None


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_failed_step_is_an_error_for_its_requests_and_nobody_else(real, endpoint, caplog):
    caplog.set_level(logging.CRITICAL)
    for n, usage in product([1, 3], [False, True]):
        options = {"stream_options": {"include_usage": True}} if usage else {}
        # Armed before asking: the scripted model can be done before a busy client has read its first chunk.
        real.fail_in(20)
        stream = ask(real, endpoint, n=n, stream=True, max_tokens=50, **options)
        text = ""
        with pytest.raises(openai.APIError, match="injected"):  # noqa: PT012  (the failure comes while iterating)
            for chunk in stream:
                for choice in chunk.choices:
                    text += (choice.delta.content if endpoint == "chat" else choice.text) or ""
        assert text
        # A choice that came too late for the failed step goes on, and would take the next failure upon itself.
        real.check_idle()
        real.fail_in(0)
        with pytest.raises(openai.InternalServerError, match="injected"):
            ask(real, endpoint, n=n, max_tokens=5)
        assert ask(real, endpoint, max_tokens=2).choices[0].finish_reason == "length"


def test_the_text_is_the_models(real, scripted):
    reply = real.client.completions.create(
        model="tiny", prompt=[1, 2, 3], temperature=0, max_tokens=6, extra_body={"return_token_ids": True}
    )
    expected = scripted.greedy([1, 2, 3], 6, real.tokenizer.vocab_size)
    assert reply.choices[0].model_extra["token_ids"] == expected
    assert reply.choices[0].text == real.tokenizer.decode(expected)


def test_seeded_answers_repeat_and_choices_differ(real):
    fields = {"temperature": 5.0, "seed": 11, "max_tokens": 12, "n": 3}
    first = texts_and_reasons(ask(real, "chat", **fields).choices)
    assert texts_and_reasons(ask(real, "chat", **fields).choices) == first
    assert len({text for text, _ in first}) == 3
    alone = texts_and_reasons(ask(real, "chat", **{**fields, "n": 1}).choices)
    assert alone == first[:1]


def test_logprobs_are_read_by_the_client(real):
    chat = ask(real, "chat", max_tokens=4, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(entry.token for entry in chat.logprobs.content) == chat.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in chat.logprobs.content)
    assert all(entry.logprob <= 0 for entry in chat.logprobs.content)
    text = ask(real, "completions", max_tokens=4, logprobs=2).choices[0]
    assert "".join(text.logprobs.tokens) == text.text
    assert text.logprobs.text_offset == [0, 1, 2, 3]
    stream = list(ask(real, "chat", max_tokens=4, logprobs=True, stream=True))
    streamed = [entry for chunk in stream for entry in (chunk.choices[0].logprobs or _Empty).content]
    assert [entry.token for entry in streamed] == [entry.token for entry in chat.logprobs.content]


class _Empty:
    content: tuple[()] = ()


def test_a_second_identical_prompt_is_cached_and_salted_ones_are_not(real):
    cached = [
        ask(real, "chat", max_tokens=2, extra_body=body).usage.prompt_tokens_details.cached_tokens
        for body in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"})
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0


def test_errors_are_the_clients_own_exceptions(real):
    with pytest.raises(openai.NotFoundError) as not_found:
        real.client.completions.create(model="gpt-9", prompt="x")
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(real, "completions", max_tokens=1000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as no_tools:
        ask(real, "chat", tools=[{"type": "function", "function": {"name": "f"}}])
    assert no_tools.value.param == "tools"
    assert real.client.models.list().data[0].id == "tiny"
    assert real.client.models.retrieve("tiny").model_extra["max_model_len"] == 128


def test_leaving_a_stream_frees_its_blocks(real, monkeypatch):
    """The engine is held after a few tokens until the server has given all four up: it would finish them first."""
    aborted = threading.Semaphore(0)
    abort = real.engine.abort
    monkeypatch.setattr(real.engine, "abort", lambda request_id: (abort(request_id), aborted.release()))

    def hold(plan: Any) -> None:
        if plan.positions.max() > 10:
            assert all(aborted.acquire(timeout=10) for _ in range(4))
            real.executor.before_step = real.before_step

    real.executor.before_step = hold
    stream = ask(real, "completions", stream=True, max_tokens=100, n=4)
    next(iter(stream))
    stream.close()
    real.check_idle()
    before = real.engine.stats().output_tokens
    time.sleep(0.1)
    assert real.engine.stats().output_tokens == before < 400


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_echo_scores_the_prompt_as_the_model_does(real, scripted, max_tokens):
    fields = {"logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    reply = real.lenient_client.completions.create(model="tiny", prompt="hello", echo=True, **fields)
    [choice] = reply.choices
    ids = [*real.tokenizer.encode("hello"), *scripted.greedy(real.tokenizer.encode("hello"), max_tokens, 257)]
    figures = choice.logprobs
    assert choice.text == real.tokenizer.decode(ids)
    assert len(figures.tokens) == len(ids)
    assert figures.tokens[:5] == list("hello")
    logits = scripted.logits(ids, 257).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [logprobs[place, token] for place, token in enumerate(ids[1:])]
    assert figures.token_logprobs[0] is None
    assert figures.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert figures.text_offset[:5] == [0, 1, 2, 3, 4]
    assert reply.usage.completion_tokens == max_tokens
    streamed = [
        chunk.choices[0]
        for chunk in real.lenient_client.completions.create(
            model="tiny", prompt="hello", echo=True, stream=True, **fields
        )
    ]
    assert "".join(chunk.text for chunk in streamed) == choice.text
    assert [value for chunk in streamed for value in chunk.logprobs.token_logprobs] == figures.token_logprobs


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_special_token_may_be_a_stop_string(real, endpoint):
    forced = {"logit_bias": {str(real.eos): 100}, "max_tokens": 9}
    never = {**forced, "extra_body": {"ignore_eos": True}}
    assert texts_and_reasons(ask(real, endpoint, **never).choices) == [("", "length")]
    stops = ["x", "y", "zz", EOS_TEXT]
    answer = ask(real, endpoint, **never, stop=stops)
    assert texts_and_reasons(answer.choices) == [("", "stop")]
    assert answer.usage.completion_tokens == 1


def test_a_text_is_tokenized_as_the_model_is_given_it(real):
    tokens = real.http.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    assert tokens == real.tokenizer.encode("hello")
    assert real.http.post("/detokenize", json={"tokens": [*tokens, real.eos]}).json() == {"prompt": "hello" + EOS_TEXT}
    messages = [{"role": "user", "content": f"a{EOS_TEXT}b"}]
    chat = real.http.post("/tokenize", json={"messages": messages}).json()
    assert real.eos not in chat["tokens"], "a user's text formed a control token"
    reply = real.client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert reply.usage.prompt_tokens == chat["count"]


def test_the_smallest_values_that_are_taken_can_be_sampled_with(real):
    small = {"top_p": 1e-6, "extra_body": {"repetition_penalty": 1e-6, "min_p": 1e-320}}
    assert len(ask(real, "completions", max_tokens=20, **small).choices[0].text) == 20
    text = ask(real, "completions", max_tokens=20, **{**small, "temperature": 1e-320}).choices[0].text
    assert len(text) == 20
