"""`echo`: the prompt before the answer, and its log-probabilities before the answer's."""

from __future__ import annotations

import pytest

from optimc_runtime.server import ServerOptions

H, I = 16 + ord("h"), 16 + ord("i")  # noqa: E741 - the prompt's tokens

PROMPTS = {
    "text": ("hi", ["hi"], [[H, I]]),
    "texts": (["hi", "yo"], ["hi", "yo"], [[H, I], [16 + ord("y"), 16 + ord("o")]]),
    "ids": ([H, I], ["hi"], [[H, I]]),
    "ids with a special token": ([[1, H, I]], ["<1>hi"], [[1, H, I]]),
}


@pytest.mark.parametrize("max_tokens", [0, 50])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", PROMPTS)
def test_every_choice_begins_with_its_prompt(served, script, read_stream, form, stream, logprobs, n, max_tokens):
    prompt, echoes, ids = PROMPTS[form]
    served.engine.script = script(pieces=["ab", "c"], eos=False, finish="length")
    fields = {"prompt": prompt, "echo": True, "n": n, "max_tokens": max_tokens, "logprobs": logprobs}
    if stream:
        read = read_stream(served, "/v1/completions", fields)
        choices = [(read.choices[i].text, read.choices[i].logprobs) for i in range(n * len(echoes))]
    else:
        reply = served.complete(**fields).json()
        choices = [(choice["text"], choice["logprobs"]) for choice in reply["choices"]]
        assert reply["usage"]["completion_tokens"] == (3 if max_tokens else 0) * len(choices)
    answer = "abc" if max_tokens else ""
    for index, (text, figures) in enumerate(choices):
        said, tokens = echoes[index // n], ids[index // n]
        assert text == said + answer
        if logprobs is None:
            assert figures is None
            continue
        names = [f"<{token}>" if token < 16 else chr(token - 16) for token in tokens] + list(answer)
        assert figures["tokens"] == names
        assert figures["token_logprobs"] == [None] + [-0.25] * (len(tokens) - 1) + [-0.5] * len(answer)
        assert figures["text_offset"] == [sum(map(len, names[:place])) for place in range(len(names))]
        assert figures["top_logprobs"][0] is None
        assert [top[name] for top, name in zip(figures["top_logprobs"][1:], names[1:], strict=True)] == [-0.25] * (
            len(tokens) - 1
        ) + [-0.5] * len(answer)
        assert all(len(top) == 1 + logprobs for top in figures["top_logprobs"][1:])


def test_without_echo_the_engine_is_not_asked_for_the_prompt(served):
    served.complete("hi", logprobs=1).raise_for_status()
    served.complete("hi", echo=True).raise_for_status()
    served.complete("hi", echo=True, logprobs=1).raise_for_status()
    assert [entry.params.prompt_logprobs for entry in served.engine.submitted] == [False, False, True]


def test_token_ids_are_the_answers(served, read_stream):
    fields = {"prompt": "hi", "echo": True, "return_token_ids": True, "max_tokens": 20}
    [choice] = served.complete(**fields).json()["choices"]
    assert choice["text"] == "hiHello world"
    assert len(choice["token_ids"]) == 12
    assert read_stream(served, "/v1/completions", fields).choices[0].token_ids == choice["token_ids"]


def test_no_tokens_at_all_are_for_echo_only(served, error_of):
    refused = served.complete("hi", max_tokens=0)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "max_tokens"
    assert "echo" in error_of(refused)["message"]
    assert served.chat("hi", max_tokens=0).status_code == 400


def test_chat_has_no_echo(served, error_of):
    refused = served.chat("hi", echo=True)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "echo"


def test_one_request_does_not_ask_for_a_million_figures(served, error_of):
    refused = served.complete([[20] * 4000] * 9, echo=True, logprobs=0, max_tokens=0)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "echo"
    assert "36,000" in error_of(refused)["message"]
    assert served.engine.submitted == []
    assert served.complete([[20] * 4000] * 9, echo=True, max_tokens=0).status_code == 200


def test_a_prompt_that_does_not_fit_is_not_worded_first(served, monkeypatch, error_of):
    monkeypatch.setattr(served.engine.tokenizer, "decode", None)
    refused = served.complete([20] * 5000, echo=True)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "context_length_exceeded"


def test_without_a_tokenizer_the_prompt_has_figures_and_no_text(start_server, engine):
    engine.tokenizer = None
    with start_server(engine, None, ServerOptions()) as served:
        [choice] = served.complete([20, 21], echo=True, logprobs=0, max_tokens=0).json()["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:20", "token_id:21"]
