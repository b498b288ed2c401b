"""What /v1/chat/completions does with its fields."""

from __future__ import annotations

import pytest


def test_answers_with_text_reason_and_usage(served):
    reply = served.chat("hi").json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "scripted"
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello world", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt_tokens = len([1, *b"uhi", 2, 1])
    assert reply["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_text_parts_are_joined_in_order_with_nothing_between(served):
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B "}, {"type": "text", "text": "C"}]
    by_parts = served.chat(parts).json()["usage"]["prompt_tokens"]
    by_text = served.chat("AB C").json()["usage"]["prompt_tokens"]
    assert by_parts == by_text
    assert served.template.seen[0] == served.template.seen[1]


def test_developer_is_the_newer_name_of_system(served):
    served.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]},
    ).raise_for_status()
    assert [message["role"] for message in served.template.seen[0]] == ["system", "user"]


def test_an_assistant_message_is_accepted_as_clients_send_it_back(served):
    answer = served.chat("hi").json()["choices"][0]["message"]
    dumped = {**answer, "annotations": None, "audio": None, "function_call": None, "tool_calls": None}
    messages = [{"role": "user", "content": "hi"}, dumped, {"role": "user", "content": "more", "name": "ann"}]
    assert served.http.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    assert served.template.seen[1] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello world"},
        {"role": "user", "content": "more", "name": "ann"},
    ]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_work(served, name):
    served.chat("hi", **{name: 7}).raise_for_status()
    assert served.engine.submitted[0].params.max_tokens == 7


def test_both_names_together_must_agree(served):
    assert served.chat("hi", max_tokens=7, max_completion_tokens=7).status_code == 200
    refused = served.chat("hi", max_tokens=7, max_completion_tokens=8)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_tokens"


def test_without_a_limit_the_sequence_may_be_filled(served):
    served.chat("hi").raise_for_status()
    assert served.engine.submitted[0].params.max_tokens is None


def test_every_sampling_field_reaches_the_engine(served):
    served.chat(
        "hi",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"17": -100, "18": 2.5},
        seed=12,
        stop=["a", "b"],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        cache_salt="tenant",
        user="someone",
    ).raise_for_status()
    [entry] = served.engine.submitted
    params = entry.params
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_p) == (9, 2, 0.5, 0.9)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (40, 0.05, 1.1)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.logit_bias == {17: -100, 18: 2.5}
    assert (params.seed, params.stop, params.stop_token_ids) == (12, ("a", "b"), (5, 6))
    assert (params.ignore_eos, params.logprobs) == (True, 3)
    assert entry.cache_salt == "tenant"


def test_nulls_are_defaults(served):
    names = (
        "max_tokens max_completion_tokens temperature top_p n stop seed logit_bias user stream_options tools "
        "tool_choice response_format logprobs top_logprobs stream presence_penalty frequency_penalty model"
    )
    served.chat("hi", **dict.fromkeys(names.split())).raise_for_status()
    default = served.chat("hi")
    default.raise_for_status()
    first, second = served.engine.submitted
    assert first.params == second.params


def test_a_single_stop_string_is_a_list_of_one(served):
    served.chat("hi", stop="END").raise_for_status()
    assert served.engine.submitted[0].params.stop == ("END",)


def test_choices_have_seeds_of_their_own_and_the_first_has_the_requests(served):
    reply = served.chat("hi", n=3, seed=5).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    seeds = [entry.params.seed for entry in served.engine.submitted]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    served.chat("hi", n=3, seed=5).raise_for_status()
    assert [entry.params.seed for entry in served.engine.submitted[3:]] == seeds
    served.chat("hi", n=3).raise_for_status()
    assert [entry.params.seed for entry in served.engine.submitted[6:]] == [None] * 3


def test_a_prompt_counts_once_however_many_choices_it_has(served):
    one = served.chat("hi").json()["usage"]
    three = served.chat("hi", n=3).json()["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["prompt_tokens_details"] == one["prompt_tokens_details"]


def test_logprobs_have_one_entry_per_counted_token(served):
    reply = served.chat("hi", logprobs=True, top_logprobs=2).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert len(content) == reply["usage"]["completion_tokens"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [
            {"token": chr(40 - 16), "logprob": -1.0, "bytes": [24]},
            {"token": chr(41 - 16), "logprob": -2.0, "bytes": [25]},
        ],
    }
    assert content[-1]["token"] == "<3>"
    alone = served.chat("hi", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert alone[0]["top_logprobs"] == []
    assert served.chat("hi").json()["choices"][0]["logprobs"] is None


def test_a_token_that_is_half_a_character_is_named_by_its_bytes(served, script):
    served.engine.script = script(pieces=["é"])
    content = served.chat("hi", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "<3>"]
    assert bytes(content[0]["bytes"] + content[1]["bytes"]).decode() == "é"


def test_token_ids_are_returned_when_asked_for(served):
    reply = served.chat("hi", return_token_ids=True).json()
    assert reply["choices"][0]["token_ids"] == [16 + byte for byte in b"Hello world"] + [3]
    assert "token_ids" not in served.chat("hi").json()["choices"][0]


def test_without_a_template_chat_is_refused_with_the_way_out(start_server, engine):
    from optimc_runtime.server import ServerOptions

    with start_server(engine, None, ServerOptions()) as served:
        refused = served.chat("hi")
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]
        assert served.complete("hi").status_code == 200


def test_generation_defaults_apply_until_the_request_says_otherwise(start_server, engine, template):
    from optimc_runtime.server import ServerOptions

    options = ServerOptions(generation_defaults={"temperature": 0.6, "top_k": 20})
    with start_server(engine, template, options) as served:
        served.chat("hi").raise_for_status()
        served.chat("hi", temperature=1.0, top_k=None).raise_for_status()
        first, second = served.engine.submitted
        assert (first.params.temperature, first.params.top_k) == (0.6, 20)
        assert (second.params.temperature, second.params.top_k) == (1.0, 20)


def test_template_variables_reach_the_template_but_not_its_own(served, error_of):
    assert served.chat("hi", chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert served.template.extra == {"enable_thinking": False}
    refused = served.chat("hi", chat_template_kwargs={"messages": []})
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "chat_template_kwargs"
