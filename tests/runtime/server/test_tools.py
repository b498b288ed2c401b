"""Tool calls: what the model is shown, what it must write, how its answer is read, whole and streamed."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.server import ServerOptions
from optimc_runtime.server.tools.detect import FORMATS, format_of
from optimc_runtime.server.tools.hermes import HERMES
from optimc_runtime.server.tools.llama3 import LLAMA3
from optimc_runtime.server.tools.mistral import MISTRAL
from optimc_runtime.server.tools.wording import joined
from optimc_runtime.structured.compiler import GrammarCompiler
from optimc_runtime.structured.grammar_spec import GrammarSpec

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
SOURCES = {
    "hermes": "{% if tools %}<tools>{{ tools | tojson }}</tools> answer in <tool_call></tool_call>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}[TOOL_CALLS]",
    "llama3": "{% if tools %}<|python_tag|>{{ tools | tojson }}{% endif %}",
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "llama3": '{"name": "weather", "parameters": {"city": "Oslo"}}',
}
BY_NAME = {each.name: each for each in FORMATS}


class ToolTemplate:
    """As the scripted template, of a model that was taught to call tools."""

    supports_tools = True

    def __init__(self, source):
        self.source = source
        self.seen, self.extra = [], {}

    def encode(self, tokenizer, messages, **extra):
        self.seen.append(messages)
        self.extra = extra
        return tokenizer.encode("".join(message["content"] for message in messages) or "?")


@pytest.fixture
def taught(start_server, engine):
    """Start a server of a model that calls tools in the format of this name."""

    @contextmanager
    def start(name):
        engine.compile_grammar = lambda spec: spec
        template = ToolTemplate(SOURCES[name])
        with start_server(engine, template, ServerOptions()) as served:
            served.template = template
            yield served

    return start


def pieces_of(tool_format, texts, names=("weather", "now")):
    parser = tool_format.parser(names)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return pieces + parser.finish()


def read(tool_format, *texts):
    """The text and the calls, as (name, arguments)."""
    text, calls = joined(pieces_of(tool_format, texts))
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


NOW = '{"name": "now", "arguments": {}}'
OSLO = ("weather", '{"city": "Oslo"}')

READ = {
    "a call": (HERMES, CALLS["hermes"], "", [OSLO]),
    "text before": (HERMES, "Let me see.\n\n" + CALLS["hermes"], "Let me see.", [OSLO]),
    "text behind": (HERMES, CALLS["hermes"] + "\n There.", "There.", [OSLO]),
    "two calls": (HERMES, CALLS["hermes"] + "\n" + CALLS["hermes"], "", [OSLO, OSLO]),
    "two in one pair of markers": (HERMES, f"<tool_call>{NOW}\n{NOW}</tool_call>", "", [("now", "{}"), ("now", "{}")]),
    "no call at all": (HERMES, " just a <tool, {} and\n", " just a <tool, {} and\n", []),
    "arguments first": (HERMES, '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "",
                        [OSLO]),
    "more behind": (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}, "id": 3}</tool_call>', "",
                    [OSLO]),
    "braces in strings": (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "}\\"{</tool_call>"}}', "",
                          [("weather", '{"city": "}\\"{</tool_call>"}')]),
    "unknown function": (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
                         '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
    "no object": (HERMES, "<tool_call>hello</tool_call>", "<tool_call>hello</tool_call>", []),
    "nothing between": (HERMES, "<tool_call>\n</tool_call>", "<tool_call>\n</tool_call>", []),
    "arguments of another kind": (HERMES, '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
                                  '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', []),
    "cut in the name": (HERMES, 'x <tool_call>{"name": "wea', 'x <tool_call>{"name": "wea', []),
    "cut in the arguments": (HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Os', "",
                             [("weather", '{"city": "Os')]),
    "cut in the marker": (HERMES, "x <tool_ca", "x <tool_ca", []),
    "cut behind the call": (HERMES, CALLS["hermes"][:-3], "", [OSLO]),
    "mistral": (MISTRAL, CALLS["mistral"], "", [OSLO]),
    "mistral, spaced": (MISTRAL, "[TOOL_CALLS] " + json.dumps([{"name": "now", "arguments": {}}] * 2), "",
                        [("now", "{}"), ("now", "{}")]),
    "mistral, text": (MISTRAL, "a [list], {an: object}", "a [list], {an: object}", []),
    "llama, bare": (LLAMA3, CALLS["llama3"], "", [OSLO]),
    "llama, tagged": (LLAMA3, "Well.<|python_tag|>" + CALLS["llama3"], "Well.", [OSLO]),
    "llama, two": (LLAMA3, CALLS["llama3"] + "; " + CALLS["llama3"], "", [OSLO, OSLO]),
    "llama, another object": (LLAMA3, ' {"city": "Oslo"}', ' {"city": "Oslo"}', []),
    "llama, an object in text": (LLAMA3, "See " + CALLS["llama3"], "See " + CALLS["llama3"], []),
    "llama, code": (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_calls_are_told_from_text(name):
    tool_format, answer, text, calls = READ[name]
    assert read(tool_format, answer) == (text, calls)


FRAGMENTS = [
    *CALLS.values(), "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>",
    "{", "}", '"', "\\", " ", "\n", "[", ",", "]", ";", "text", "é", NOW, '{"name": "no"}',
    '{"name": "now", "arguments": ', '{"arguments": {}, "name": "now"}',
    '{"name": "' + "x" * 600 + '", "arguments": {}}',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_however_an_answer_is_cut_the_same_comes_of_it(tool_format, answer, cuts):
    places = sorted({min(cut, len(answer)) for cut in cuts})
    bounds = zip([0, *places], [*places, len(answer)], strict=True)
    parts = [answer[start:end] for start, end in bounds]
    assert read(tool_format, *parts) == read(tool_format, answer) == read(tool_format, *answer)


def test_arguments_come_as_they_are_written():
    parser = HERMES.parser(["weather"])
    seen = [parser.push(char) for char in CALLS["hermes"]]
    arguments = [piece.text for pieces in seen for piece in pieces if type(piece).__name__ == "CallArguments"]
    assert len(arguments) == len('{"city": "Oslo"}'), "one by one"


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_the_grammar_lets_be_written_is_read_as_calls(byte_tokenizer, name, parallel):
    tool_format = BY_NAME[name]
    described = {**CITY, "description": "R&D & " * 10}
    functions = [{"name": "weather", "parameters": described}, {"name": "now"}]
    text = tool_format.grammar(functions, byte_tokenizer, parallel=parallel)
    grammar = GrammarCompiler(byte_tokenizer, 257, (256,)).compile(GrammarSpec("lark", text, "tools"))
    state = grammar.start()
    for byte in CALLS[name].encode():
        state.accept(byte)
    assert state.is_complete == (name != "hermes" or not parallel), "only Hermes' calls have no end of all calls"
    assert read(tool_format, CALLS[name])[1] == [OSLO]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        *((SOURCES[each], each) for each in SOURCES),
        ("{{ messages }}", None),
        ("<tool_call><function=f></function></tool_call> {{ tools }}", None),
        ("[TOOL_CALLS]f[ARGS]{} {{ tools }}", None),
    ],
)
def test_the_format_is_the_one_the_template_writes(source, expected):
    found = format_of(source)
    assert (None if found is None else found.name) == expected


def test_a_template_shows_tools_if_it_reads_the_variable():
    assert all(ChatTemplate(source).supports_tools for source in SOURCES.values())
    assert not ChatTemplate("{% set tools = 1 %}{{ tools }} {{ messages[0].tools }} 'tools'").supports_tools


def test_tools_count_towards_what_cannot_fit(taught, error_of):
    with taught("hermes") as served:
        served.engine.max_seq_len = 64
        refused = served.chat("hi", tools=function(description="x" * 60_000))
        assert refused.status_code == 400
        assert error_of(refused)["code"] == "context_length_exceeded"
        assert served.template.seen == [], "it was not even rendered"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "weather"}}, "none"]
)
@pytest.mark.parametrize("name", SOURCES)
def test_an_answer_with_a_call(taught, script, read_stream, name, choice, stream):
    with taught(name) as served:
        text = CALLS[name]
        served.engine.script = script(pieces=[text[at : at + 3] for at in range(0, len(text), 3)])
        fields = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": choice}
        if stream:
            [result] = read_stream(served, "/v1/chat/completions", fields).choices.values()
            content, calls, reason = result.text or None, result.tool_calls, result.finish_reason
        else:
            [reply] = served.http.post("/v1/chat/completions", json=fields).raise_for_status().json()["choices"]
            message, reason = reply["message"], reply["finish_reason"]
            content, calls = message["content"], message.get("tool_calls", [])
        [entry] = served.engine.submitted
        if choice == "none":
            assert (content, calls, reason) == (text, [], "stop")
            assert served.template.extra == {}
            assert entry.grammar is None
            return
        [call] = calls
        assert content is None
        assert call["type"] == "function"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert len(call["id"]) == (9 if name == "mistral" else 29)
        assert reason == ("stop" if isinstance(choice, dict) else "tool_calls")
        assert served.template.extra["tools"] == TOOLS
        if choice in (None, "auto"):
            assert entry.grammar is None
        else:
            assert (entry.grammar.kind, entry.grammar.param) == ("lark", "tools")
            assert ("now" in entry.grammar.text) == (choice == "required")


def test_text_around_calls_and_choices_are_kept_apart(taught, script, read_stream):
    with taught("hermes") as served:
        served.engine.script_for = lambda _prompt, nth: script(
            pieces=[("Hm. " + CALLS["hermes"]), "Just text."][nth:][:1]
        )
        fields = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "n": 2, "return_token_ids": True}
        streamed = read_stream(served, "/v1/chat/completions", fields).choices
        assert (streamed[0].text, len(streamed[0].tool_calls)) == ("Hm.", 1)
        assert (streamed[1].text, streamed[1].tool_calls) == ("Just text.", [])
        assert [streamed[index].finish_reason for index in range(2)] == ["tool_calls", "stop"]
        assert bytes(token - 16 for token in streamed[0].token_ids[:-1]).decode() == "Hm. " + CALLS["hermes"]


def test_a_call_that_is_cut_ends_with_length(taught, script):
    with taught("hermes") as served:
        served.engine.script = script(pieces=[CALLS["hermes"][:50]], finish="length", eos=False)
        [choice] = served.chat("hi", tools=TOOLS).json()["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == CALLS["hermes"][45:50]


def test_markers_that_are_special_tokens_are_shown_and_named_by_id(taught, script):
    with taught("hermes") as served:
        tokenizer = served.engine.tokenizer
        named = {"<tool_call>": 5, "</tool_call>": 6}
        tokenizer.token_id = named.get
        served.engine.script = script(pieces=[CALLS["hermes"]])
        reply = served.chat("hi", tools=TOOLS, tool_choice="required").json()["choices"][0]
        assert len(reply["message"]["tool_calls"]) == 1
        [entry] = served.engine.submitted
        assert entry.params.special_tokens_in_text
        assert "<[5]>" in entry.grammar.text
        assert "<tool_call>" not in entry.grammar.text
        served.chat("hi").raise_for_status()
        assert not served.engine.submitted[1].params.special_tokens_in_text


def test_a_conversation_with_calls_reaches_the_template_as_it_knows_it(taught):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    with taught("hermes") as served:
        served.http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS}).raise_for_status()
        parsed = {**call, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        assert served.template.seen[0] == [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [parsed]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ]


def function(**change):
    return [{"type": "function", "function": {"name": "f", **change}}]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS * 2}, "tools", "two functions are named 'weather'"),
        ({"tools": function(name="a b")}, "tools.0.function.name", "pattern"),
        ({"tools": function(name="x" * 65)}, "tools.0.function.name", "pattern"),
        ({"tools": function(parameters={"type": "string"})}, "tools.0.function.parameters", "'object'"),
        ({"tools": function(strict=True)}, "tools", "strict needs tool_choice required or a named function"),
        ({"tools": function(description="x" * 70_000)}, "tools", "at most 65,536"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "128"),
        ({"tools": TOOLS, "logprobs": True}, "logprobs", "line up"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "excludes tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "none of tools",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, None, ""),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"function_call": {"name": "f"}}, "function_call", "not supported"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "not for the request"),
    ],
)
def test_what_contradicts_itself_is_refused(taught, error_of, fields, param, words):
    with taught("hermes") as served:
        refused = served.chat("hi", **fields)
        assert refused.status_code == 400
        error = error_of(refused)
        assert words in error["message"]
        assert param is None or error["param"] == param
        assert served.engine.submitted == []


def test_strict_is_taken_where_a_call_is_sure(taught):
    with taught("hermes") as served:
        served.chat("hi", tools=function(strict=True), tool_choice="required").raise_for_status()
        assert "strict" not in json.dumps(served.template.extra)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x"},
        {"role": "user", "content": "x", "tool_call_id": "c"},
        {"role": "user", "content": "x", "tool_calls": [CALL]},
        {"role": "assistant"},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": NaN}'}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]},
        {"role": "assistant", "tool_calls": [{**CALL, "type": "other"}]},
    ],
)
def test_messages_that_make_no_sense_are_refused(taught, error_of, message):
    with taught("hermes") as served:
        refused = served.http.post("/v1/chat/completions", json={"messages": [message]})
        assert refused.status_code == 400
        assert error_of(refused)["param"].startswith("messages.0")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"messages": [CALLING]},
        {"messages": [RESULT]},
    ],
)
def test_a_template_without_tools_is_told_apart(served, error_of, fields):
    refused = served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields})
    assert refused.status_code == 400
    error = error_of(refused)
    assert (error["param"], error["code"]) == ("tools", "tools_unsupported")
    assert "no place for tools" in error["message"]
    assert served.chat("hi", tools=TOOLS, tool_choice="none").status_code == 200


@pytest.mark.parametrize("message", [CALLING, RESULT], ids=["call", "result"])
def test_tokenize_refuses_the_conversations_that_a_chat_completion_would(served, error_of, message):
    for path in ("/tokenize", "/v1/chat/completions"):
        error = error_of(served.http.post(path, json={"messages": [message]}))
        assert error["code"] == "tools_unsupported", path


def test_a_template_whose_format_nobody_knows_is_told_apart(start_server, engine, error_of):
    with start_server(engine, ToolTemplate("{{ tools }} <function=f>"), ServerOptions()) as served:
        error = error_of(served.chat("hi", tools=TOOLS))
        assert error["code"] == "tools_unsupported"
        assert "hermes, mistral, llama3" in error["message"]
