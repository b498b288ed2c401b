"""What /v1/completions does with its fields."""

from __future__ import annotations

import pytest


def test_answers_with_text_reason_and_usage(served):
    reply = served.complete("abc", max_tokens=20).json()
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert reply["usage"]["prompt_tokens"] == 3
    assert reply["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[113, 114]]),
        (["ab", "c"], [[113, 114], [115]]),
        ([20, 21], [[20, 21]]),
        ([[20, 21], [22]], [[20, 21], [22]]),
    ],
)
def test_a_prompt_comes_in_four_forms(served, prompt, expected):
    served.complete(prompt).raise_for_status()
    assert [entry.prompt for entry in served.engine.submitted] == expected


def test_choices_are_numbered_prompt_by_prompt(served, script):
    served.engine.script_for = lambda prompt, nth: script(
        pieces=[f"{chr(prompt[0] - 16)}{nth}"], delay_s=0.02 * (4 - nth)
    )
    reply = served.complete(["a", "b"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b2"),
        (3, "b3"),
    ]
    assert reply["usage"]["prompt_tokens"] == 2


def test_every_prompt_is_seeded_as_if_it_came_alone(served):
    served.complete(["a", "b"], n=2, seed=9).raise_for_status()
    seeds = [entry.params.seed for entry in served.engine.submitted]
    assert seeds[:2] == seeds[2:]


def test_the_default_limit_is_the_specifications(served):
    served.complete("a").raise_for_status()
    assert served.engine.submitted[0].params.max_tokens == 16


def test_logprobs_are_parallel_lists(served):
    reply = served.complete("a", logprobs=2).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [*"Hello world", "<3>"]
    assert logprobs["token_logprobs"] == [-0.5] * 12
    assert logprobs["text_offset"] == list(range(12))
    assert logprobs["top_logprobs"][0] == {"\x18": -1.0, "\x19": -2.0, "H": -0.5}


def test_streamed_logprobs_continue_the_offsets(served, read_stream):
    whole = served.complete("a", logprobs=1).json()["choices"][0]["logprobs"]
    streamed = read_stream(served, "/v1/completions", {"prompt": "a", "logprobs": 1}).choices[0].logprobs
    assert streamed == whole


def test_minus_infinity_becomes_a_number_json_has(served, script, monkeypatch):
    from optimc_runtime.request import TokenLogprob

    normal = served.engine._output

    def impossible(*args):
        output = normal(*args)
        worst = tuple(TokenLogprob(i, float("-inf"), ((40, float("-inf")),)) for i in output.token_ids)
        return output._replace(logprobs=worst)

    monkeypatch.setattr(served.engine, "_output", impossible)
    logprobs = served.complete("a", logprobs=1).json()["choices"][0]["logprobs"]
    assert set(logprobs["token_logprobs"]) == {-9999.0}


def test_without_a_tokenizer_ids_still_work(start_server, engine):
    from optimc_runtime.server import ServerOptions

    engine.tokenizer = None
    with start_server(engine, None, ServerOptions()) as served:
        refused = served.complete("text")
        assert refused.status_code == 400
        assert "token ids" in refused.json()["error"]["message"]
        reply = served.complete([20, 21], return_token_ids=True, logprobs=0).json()
        assert reply["choices"][0]["token_ids"][-1] == 3
        assert reply["choices"][0]["logprobs"]["tokens"][-1] == "token_id:3"
