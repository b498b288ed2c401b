"""Fields we know and do not have, fields nobody knows, and fields that never mattered."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from optimc.errors import RequestError
from optimc_runtime.request import Terms
from optimc_runtime.server import ServerOptions
from optimc_runtime.server.keys import KeyRing

UNSUPPORTED_CHAT = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "high",
    "store": True,
    "service_tier": "flex",
    "web_search_options": {},
    "continue_final_message": True,
}
UNSUPPORTED_TEXT = {"suffix": "end", "best_of": 3, "prompt_logprobs": 1, "use_beam_search": True}

NEUTRAL_CHAT = {
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    "service_tier": "auto",
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
}
NEUTRAL_TEXT = {"echo": False, "suffix": "", "best_of": 1, "user": "u", "length_penalty": 1.0}


@pytest.mark.parametrize("name", UNSUPPORTED_CHAT)
def test_what_chat_does_not_have_is_refused_by_name(served, error_of, name):
    reply = served.chat("hi", **{name: UNSUPPORTED_CHAT[name]})
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["param"], error["code"]) == (name, "unsupported_field")
    assert "not supported" in error["message"]


@pytest.mark.parametrize("name", UNSUPPORTED_TEXT)
def test_what_completions_does_not_have_is_refused_by_name(served, error_of, name):
    reply = served.complete("hi", **{name: UNSUPPORTED_TEXT[name]})
    assert reply.status_code == 400
    assert error_of(reply)["param"] == name
    assert "not supported" in error_of(reply)["message"]


@pytest.mark.parametrize("name", NEUTRAL_CHAT)
def test_values_that_ask_for_nothing_are_accepted_in_chat(served, name):
    assert served.chat("hi", **{name: NEUTRAL_CHAT[name]}).status_code == 200


@pytest.mark.parametrize("name", NEUTRAL_TEXT)
def test_values_that_ask_for_nothing_are_accepted_in_completions(served, name):
    assert served.complete("hi", **{name: NEUTRAL_TEXT[name]}).status_code == 200


def test_best_of_equal_to_n_changes_nothing(served):
    assert served.complete("hi", n=3, best_of=3).status_code == 200


def test_one_is_not_true():
    from optimc_runtime.server.protocol.parse import Unsupported

    assert not Unsupported("x", (True,)).accepts(1)
    assert not Unsupported("x", (1,)).accepts(True)


def test_unknown_fields_are_refused(served, error_of):
    reply = served.chat("hi", temprature=0.5)
    assert reply.status_code == 400
    error = error_of(reply)
    assert (error["param"], error["code"]) == ("temprature", "unknown_field")


def test_unknown_fields_are_logged_when_allowed(start_server, engine, template, caplog):
    with (
        start_server(engine, template, ServerOptions(allow_unknown_fields=True)) as served,
        caplog.at_level(logging.WARNING, "optimc_runtime.server"),
    ):
        messages = [{"role": "user", "content": "hi", "mood": "good"}]
        reply = served.http.post("/v1/chat/completions", json={"messages": messages, "temprature": 0.5})
        assert reply.status_code == 200
        assert served.chat("hi", tools=[{"type": "function"}]).status_code == 400
    assert "mood, temprature" in caplog.text
    assert len(engine.submitted) == 1


def test_generation_defaults_that_make_no_sense_fail_at_start_all_together():
    from optimc.errors import ConfigError

    with pytest.raises(ConfigError) as failure:
        ServerOptions(generation_defaults={"temperature": -1, "max_length": 20, "top_p": 0.9})
    assert [fault.where for fault in failure.value.faults] == ["max_length", "temperature"]


GIVEN = ({}, None), ({"speculation": False}, "off"), ({"speculation": "ngram"}, "ngram")


@pytest.mark.parametrize(("given", "wanted"), GIVEN)
def test_a_request_may_say_who_guesses(served, given, wanted):
    served.chat("hi", **given).raise_for_status()
    served.complete("hi", **given).raise_for_status()
    assert [entry.params.speculation for entry in served.engine.submitted] == [wanted, wanted]


@pytest.mark.parametrize("value", ["magic", True, 3])
def test_nobody_else_guesses(served, error_of, value):
    refused = served.chat("hi", speculation=value)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "speculation"


def test_a_proposer_the_engine_lacks_is_the_requests_fault(served, error_of):
    served.engine.refuse = RequestError("speculation: no proposer 'medusa'", param="speculation")
    refused = served.chat("hi", speculation="medusa")
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "speculation"


def test_whose_request_it_is_and_how_urgent_goes_to_the_engine(start_server, engine, template):
    keys = KeyRing.from_text("alice:0123456789abcdef\nbob:fedcba9876543210")
    with start_server(engine, template, ServerOptions(), keys=keys) as served:
        for key, fields in (("0123456789abcdef", {}), ("fedcba9876543210", {"priority": -7})):
            served.http.headers["authorization"] = f"Bearer {key}"
            served.chat("hi", n=2, **fields).raise_for_status()
            served.complete("hi", **fields).raise_for_status()
    alice, second, bob = Terms("alice", 0), Terms("alice", 0, is_follower=True), Terms("bob", -7)
    alice, bob = [alice, second, alice], [bob, replace(bob, is_follower=True), bob]
    assert [entry.terms for entry in engine.submitted] == [*alice, *bob]


@pytest.mark.parametrize("value", [101, -101, 0.5, "high", True])
def test_a_priority_is_a_small_integer(served, error_of, value):
    refused = served.complete("hi", priority=value)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "priority"


@pytest.mark.parametrize("stream", [False, True])
def test_the_servers_own_token_limits_hold(start_server, engine, template, error_of, stream):
    options = ServerOptions(max_prompt_tokens=5, max_output_tokens=10)
    with start_server(engine, template, options) as served:
        for refused, param in (
            (served.complete(["abc", "abcdef"], stream=stream), "prompt"),
            (served.chat("abcdef", stream=stream), "messages"),
            (served.complete("abcde", max_tokens=11, stream=stream), "max_tokens"),
            (served.chat("a", max_completion_tokens=11, stream=stream), "max_completion_tokens"),
        ):
            assert refused.status_code == 400
            assert error_of(refused)["param"] == param
            assert "this server" in error_of(refused)["message"]
        assert engine.submitted == []
        for accepted in (
            served.complete("abcde", max_tokens=10, stream=stream),
            served.complete("abcde", stream=stream),
            served.chat("", stream=stream),
            served.complete("abcde", echo=True, max_tokens=0, stream=stream),
        ):
            assert accepted.status_code == 200
    assert [entry.params.max_tokens for entry in engine.submitted] == [10, 10, 10, 0]
