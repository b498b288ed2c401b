"""Fields that say what an answer must look like: what reaches the engine, and what is refused."""

from __future__ import annotations

import json
import threading
import time

import pytest

from optimc.errors import RequestError
from optimc_runtime.structured.grammar_spec import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def wanted(name, schema=SCHEMA, **options):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **options}}


@pytest.fixture
def compiled(served, monkeypatch):
    """What the engine was asked to compile; it gets back a stand-in that says the same."""
    asked = []

    def compile_grammar(spec):
        asked.append((spec, threading.current_thread()))
        return spec

    monkeypatch.setattr(served.engine, "compile_grammar", compile_grammar)
    return asked


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize(
    ("fields", "spec"),
    [
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", "", "response_format")),
        (
            {"response_format": wanted("x", strict=True, description="what it is")},
            GrammarSpec("json_schema", json.dumps(SCHEMA), "response_format"),
        ),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+", "guided_regex")),
        ({"grammar": 'start: "a"'}, GrammarSpec("lark", 'start: "a"', "grammar")),
    ],
)
def test_the_grammar_reaches_every_choice_of_the_engine(served, compiled, path, fields, spec):
    getattr(served, path)("hi", n=2, **fields).raise_for_status()
    [(asked, thread)] = compiled
    assert asked == spec
    assert thread.name.startswith("AnyIO worker"), "not the event loop's, which others' streams need"
    assert [entry.grammar for entry in served.engine.submitted] == [spec, spec]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_a_free_answer_has_no_grammar(served, compiled, fields):
    served.chat("hi", **fields).raise_for_status()
    assert compiled == []
    assert served.engine.submitted[0].grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "a", "grammar": "b"}, "grammar", "guided_regex and grammar exclude each other"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
        ({"response_format": {**wanted("a", schema={}), "type": "json_object"}}, "response_format", "would ignore it"),
        ({"response_format": {**wanted("a", schema={}), "type": "text"}}, "response_format", "would ignore it"),
        ({"response_format": {"type": "xml"}}, "response_format.type", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, None, "name"),
        ({"response_format": wanted("a", schema=[])}, "response_format.json_schema.schema", ""),
        ({"response_format": wanted("a", extra=1)}, "response_format.json_schema.extra", "unknown field"),
        ({"guided_regex": 3}, "guided_regex", ""),
    ],
)
def test_what_is_said_twice_or_wrongly_is_refused(served, compiled, error_of, fields, param, words):
    refused = served.chat("hi", **fields)
    assert refused.status_code == 400
    error = error_of(refused)
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert compiled == []
    assert served.engine.submitted == []


def test_a_grammar_that_cannot_be_compiled_is_the_clients_fault(served, monkeypatch, error_of):
    def refuse(spec):
        raise RequestError("guided_regex: unclosed group", param=spec.param, code="invalid_grammar")

    monkeypatch.setattr(served.engine, "compile_grammar", refuse)
    refused = served.chat("hi", guided_regex="(", stream=True)
    assert refused.status_code == 400
    assert error_of(refused)["code"] == "invalid_grammar"
    assert served.engine.submitted == []


def test_an_answer_whose_grammar_fails_midway_ends_in_an_error_event(served, compiled, script, read_stream):
    served.engine.script = script(
        fail_after=1, error=RequestError("grammar: too complex", param="grammar", code="grammar_too_complex")
    )
    fields = {"messages": [{"role": "user", "content": "hi"}], "grammar": "start: /a*/"}
    stream = read_stream(served, "/v1/chat/completions", fields)
    assert stream.error["code"] == "grammar_too_complex"
    assert stream.error["type"] == "invalid_request_error"
    whole = served.chat("hi", grammar="start: /a*/")
    assert whole.status_code == 400


def test_no_more_than_two_grammars_are_compiled_at_once(served, monkeypatch):
    running, most = [], []
    lock = threading.Lock()
    gate = threading.Event()

    def compile_grammar(spec):
        with lock:
            running.append(spec)
            most.append(len(running))
        gate.wait(10)
        with lock:
            running.remove(spec)
        return spec

    monkeypatch.setattr(served.engine, "compile_grammar", compile_grammar)
    threads = [
        threading.Thread(target=served.chat, args=("hi",), kwargs={"guided_regex": "a" * n}) for n in range(1, 6)
    ]
    for thread in threads:
        thread.start()
    while len(most) < 2:
        time.sleep(0.01)
    free = served.chat("hi")  # others are answered meanwhile
    assert free.status_code == 200
    gate.set()
    for thread in threads:
        thread.join(20)
    assert max(most) == 2
    assert len(most) == 5
