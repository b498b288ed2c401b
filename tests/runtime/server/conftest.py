"""A scripted engine behind a real server on loopback, and a strict reader of what comes back."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest

from optimc.errors import EngineError, OptimcError, OverloadedError, RequestError
from optimc_runtime.request import (
    FinishReason,
    RequestId,
    RequestOutput,
    SamplingParams,
    Terms,
    Timings,
    TokenLogprob,
    Usage,
)
from optimc_runtime.server import HttpServer, ServerOptions, build_app
from optimc_runtime.server.openapi import document
from optimc_runtime.stats import EngineStats, SpeculationStats

MODEL = "scripted"
EOS = 3
FIRST_BYTE = 16
VOCAB = FIRST_BYTE + 256


class ByteTokenizer:
    """Token id 16 + b is the byte b; ids below are special: 1 begins a turn, 2 ends it, 3 is EOS."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    @property
    def pieces(self) -> ByteTokenizer:
        return self

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id - FIRST_BYTE]) if token_id >= FIRST_BYTE else f"<{token_id}>".encode()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (token_id for token_id in ids if token_id >= FIRST_BYTE or not skip_special_tokens)
        return b"".join(map(self.bytes_of, shown)).decode(errors="replace")

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(FIRST_BYTE))

    def token_id(self, token: str) -> int | None:
        return next((i for i in range(VOCAB) if self.bytes_of(i) == token.encode()), None)


class TurnTemplate:
    """Every message becomes: 1, the role's first letter, the content, 2."""

    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    supports_tools = False

    def __init__(self) -> None:
        self.seen: list[Sequence[Mapping[str, Any]]] = []
        self.extra: dict[str, Any] = {}

    def encode(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        self.seen.append(messages)
        self.extra = extra
        ids: list[int] = []
        for message in messages:
            ids += [1, *tokenizer.encode(message["role"][0] + message["content"]), 2]
        return [*ids, 1]


@dataclass(frozen=True)
class Script:
    """What the engine answers. `pieces` are texts of one increment each, one token per byte."""

    pieces: Sequence[str] = ("Hello", " wor", "ld")
    finish: FinishReason = "stop"
    eos: bool = True
    """End with an EOS token, which has no text."""
    held_back: str = ""
    """Text of the last tokens that a stop string took away."""
    delay_s: float = 0.0
    fail_after: int | None = None
    """Increments before the request ends with `error`."""
    error: OptimcError = field(default_factory=lambda: EngineError("step 3 failed: injected"))


@dataclass(frozen=True)
class StubGrammar:
    """Stands for a compiled grammar; the scripted engine does not keep to it."""

    spec: Any


@dataclass
class Submitted:
    prompt: list[int]
    params: SamplingParams
    cache_salt: str
    request_id: RequestId
    terms: Terms = field(default_factory=Terms)
    grammar: Any = None
    aborted: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    sent_tokens: int = 0


class ScriptedEngine:
    """Answers each request from a thread of its own, as `script` (or `script_for(prompt, nth)`) says."""

    def __init__(self) -> None:
        self.max_seq_len = 4096
        self.max_request_tokens = 4096
        self.max_seqs = 16
        self.vocab_size = VOCAB
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.reset()

    def reset(self) -> None:
        self.script = Script()
        self.script_for: Callable[[list[int], int], Script] | None = None
        self.healthy = True
        self.stalled = 0.0
        """Seconds without a step, as `stalled_s` reports them."""
        self.compiled: list[Any] = []
        self.compile_s = 0.0
        """How long a grammar takes to compile."""
        self.grammar_error: RequestError | None = None
        self.capacity: int | None = None
        self.submitted: list[Submitted] = []
        self.refuse: OptimcError | None = None
        self.submit_raises: Exception | None = None
        self.speculation: SpeculationStats | None = None
        self._lock = threading.Lock()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[RequestOutput], None],
        request_id: str | None = None,
        cache_salt: str = "",
        terms: Terms = Terms(),  # noqa: B008 - frozen
        grammar: Any = None,
    ) -> RequestId:
        if self.submit_raises is not None:
            raise self.submit_raises
        if self.refuse is not None:
            raise self.refuse
        if len(prompt_ids) + (1 if params.max_tokens is None else params.max_tokens) > self.max_seq_len:
            raise RequestError(f"{len(prompt_ids)} prompt tokens do not fit", code="context_length_exceeded")
        with self._lock:
            if self.capacity is not None and len(self.live()) >= self.capacity:
                raise OverloadedError(f"{self.capacity} requests are waiting already", retry_after_s=0.2)
            assert request_id is not None
            entry = Submitted(list(prompt_ids), params, cache_salt, RequestId(request_id), terms, grammar)
            self.submitted.append(entry)
            script = self.script_for(entry.prompt, len(self.submitted) - 1) if self.script_for else self.script
        threading.Thread(target=self._play, args=(entry, script, on_output), daemon=True).start()
        return entry.request_id

    def abort(self, request_id: RequestId) -> None:
        for entry in self.submitted:
            if entry.request_id == request_id:
                entry.aborted.set()

    def live(self) -> list[Submitted]:
        return [entry for entry in self.submitted if not entry.ended.is_set()]

    def stats(self) -> EngineStats:
        done = sum(entry.sent_tokens for entry in self.submitted)
        return EngineStats(
            running=len(self.live()), waiting=2, blocks_total=10, blocks_free=4, blocks_cached=1, blocks_used=5,
            steps=7, failed_steps=1, prompt_tokens=11, output_tokens=done, prefix_queried_tokens=100,
            prefix_hit_tokens=40, preemptions=3, finished={}, last_step_s=0.25, schedule_s=1.0, execute_s=2.0,
            sample_s=3.0, commit_s=4.0, draft_s=5.0, speculation=self.speculation,
        )  # fmt: skip

    def compile_grammar(self, spec: Any) -> StubGrammar:
        time.sleep(self.compile_s)
        if self.grammar_error is not None:
            raise self.grammar_error
        self.compiled.append(spec)
        return StubGrammar(spec)

    def stalled_s(self) -> float:
        return self.stalled

    def is_healthy(self, threshold_s: float) -> bool:
        return self.healthy and self.stalled <= threshold_s

    def _play(self, entry: Submitted, script: Script, on_output: Callable[[RequestOutput], None]) -> None:
        start = time.monotonic()
        timings = Timings(arrival_s=start, scheduled_s=start)
        told_prompt = None
        if entry.params.prompt_logprobs:
            assert entry.params.logprobs is not None
            tops = tuple((40 + rank, -2.0 - rank) for rank in range(entry.params.logprobs))
            told_prompt = (None, *(TokenLogprob(token_id, -0.25, tops) for token_id in entry.prompt[1:]))
        if entry.params.max_tokens == 0:
            entry.ended.set()
            on_output(self._output(entry, (), "", timings, "length")._replace(prompt_logprobs=told_prompt))
            return
        increments = [(piece, piece.encode()) for piece in script.pieces]
        last = script.held_back.encode()
        for number, (text, data) in enumerate([*increments, ("", last)]):
            final = number == len(increments)
            if entry.aborted.wait(script.delay_s):
                entry.ended.set()
                on_output(self._output(entry, (), "", timings, "abort"))
                return
            if number == script.fail_after:
                entry.ended.set()
                on_output(self._output(entry, (), "", timings, "error")._replace(error=script.error))
                return
            ids = tuple(FIRST_BYTE + byte for byte in data)
            if final and script.eos:
                ids = (*ids, EOS)
            entry.sent_tokens += len(ids)
            now = time.monotonic()
            timings = replace(timings, first_token_s=timings.first_token_s or now, finished_s=now if final else None)
            if final:
                entry.ended.set()
            output = self._output(entry, ids, text, timings, script.finish if final else None)
            on_output(output._replace(prompt_logprobs=told_prompt))
            told_prompt = None

    def _output(
        self, entry: Submitted, ids: tuple[int, ...], text: str, timings: Timings, finish: FinishReason | None
    ) -> RequestOutput:
        wanted = entry.params.logprobs
        logprobs = None
        if wanted is not None:
            tops = tuple((40 + rank, -1.0 - rank) for rank in range(wanted))
            logprobs = tuple(TokenLogprob(token_id, -0.5, tops) for token_id in ids)
        usage = Usage(len(entry.prompt), entry.sent_tokens, cached_tokens=min(4, len(entry.prompt) - 1))
        return RequestOutput(entry.request_id, ids, text, logprobs, finish, usage, timings)


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    components = document(MODEL, has_keys=False, has_page=True)["components"]
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def conforms(name: str, value: Any) -> None:
    """Hold a value against a schema of the server's own OpenAPI document, which leaves no room for other fields."""
    _validator(name).validate(value)


def _checked(response: httpx.Response, whole: str) -> httpx.Response:
    """Hold a reply that is no stream against what the document says of it."""
    if response.headers["content-type"] == "application/json":
        conforms(whole if response.status_code == 200 else "Error", response.json())
    return response


@dataclass
class Served:
    """A running server, its scripted engine and its template."""

    url: str
    engine: ScriptedEngine
    template: TurnTemplate
    http: httpx.Client

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return _checked(self.http.post("/v1/chat/completions", json=body), "ChatCompletion")

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": prompt, **fields}
        return _checked(self.http.post("/v1/completions", json=body), "Completion")

    def metric(self, name: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rsplit(" ", 1)[1])
        raise LookupError(name)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)


@contextmanager
def _running(
    engine: ScriptedEngine, template: Any, options: ServerOptions, *, model_name: str = MODEL, **app_options: Any
) -> Iterator[Served]:
    app = build_app(engine, model_name=model_name, chat_template=template, options=options, **app_options)
    ready = threading.Event()
    server = HttpServer(app, port=0, drain_timeout_s=2, on_ready=lambda _url: ready.set())
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert ready.wait(10), "the server did not start"
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
            yield Served(server.url, engine, template or TurnTemplate(), client)
    finally:
        server.stop()
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def start_server() -> Callable[..., Any]:
    """Return a context manager running a server of one's own: (engine, template, options, more of `build_app`)."""
    return _running


@pytest.fixture(scope="module")
def _shared() -> Iterator[Served]:
    with _running(ScriptedEngine(), TurnTemplate(), ServerOptions()) as served:
        yield served


@pytest.fixture
def served(_shared: Served) -> Iterator[Served]:
    """A server shared by the module, with a fresh script; nothing may be left running at the end of the test."""
    _shared.engine.reset()
    _shared.template.seen.clear()
    yield _shared
    deadline = time.monotonic() + 5
    while _shared.engine.live() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _shared.engine.live(), "the test left requests running"


@pytest.fixture(scope="session")
def script() -> type[Script]:
    return Script


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def template() -> TurnTemplate:
    return TurnTemplate()


@dataclass
class StreamedChoice:
    """One choice put together from its chunks."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As a whole message would have them."""


@dataclass
class ReadStream:
    """A whole streamed reply, checked against the API's rules."""

    choices: dict[int, StreamedChoice]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    chunks: list[dict[str, Any]]
    events: list[str]


def check_error(body: dict[str, Any]) -> dict[str, Any]:
    """Check an error object's shape and return it."""
    conforms("Error", body)
    error: dict[str, Any] = body["error"]
    return error


def check_usage(usage: dict[str, Any]) -> None:
    """Check a usage object's shape and sums."""
    conforms("Usage", usage)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


def check_stream(raw: bytes, *, chat: bool, n: int, include_usage: bool) -> ReadStream:
    """Read raw server-sent events and enforce every rule of the stream's shape."""
    text = raw.decode("ascii")
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    data = [event.removeprefix("data: ") for event in events]
    result = ReadStream({}, None, None, [], events)
    *body, last = data
    failed = '"error"' in last
    if failed:
        result.error = check_error(json.loads(last))
    else:
        assert last == "[DONE]"
    if include_usage and not failed:
        *body, tail = body
        final = json.loads(tail)
        conforms("ChatChunk" if chat else "CompletionChunk", final)
        assert final["choices"] == []
        check_usage(final["usage"])
        result.usage = final["usage"]
        result.chunks.append(final)
    heads = set()
    for line in body:
        chunk = json.loads(line)
        conforms("ChatChunk" if chat else "CompletionChunk", chunk)
        assert ("usage" in chunk) == include_usage
        assert chunk.get("usage") is None
        heads.add((chunk["id"], chunk["created"], chunk["model"]))
        [choice] = chunk["choices"]
        _check_chunk(choice, result.choices, chat=chat, n=n)
        result.chunks.append(chunk)
    assert len(heads) <= 1
    if not failed:
        assert sorted(result.choices) == list(range(n))
        assert all(choice.finish_reason for choice in result.choices.values())
    return result


def _check_chunk(choice: dict[str, Any], choices: dict[int, StreamedChoice], *, chat: bool, n: int) -> None:
    index = choice["index"]
    assert 0 <= index < n
    begun = index in choices
    state = choices.setdefault(index, StreamedChoice())
    assert state.finish_reason is None, "nothing may follow the finish reason"
    if chat:
        delta = choice["delta"]
        assert ("role" in delta) == (not begun), "the role comes first, and once"
        assert (delta == {}) == (choice["finish_reason"] is not None), "the reason comes alone"
        state.text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            _add_call(state.tool_calls, call)
    else:
        state.text += choice["text"]
    state.finish_reason = choice["finish_reason"]
    state.token_ids += choice.get("token_ids", [])
    if choice["logprobs"] is not None:
        gathered = state.logprobs or {key: [] for key in choice["logprobs"]}
        for key, values in choice["logprobs"].items():
            gathered[key] = None if values is None else gathered[key] + values
        state.logprobs = gathered


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if "id" in delta:
        assert delta["index"] == len(calls), "calls begin in order"
        calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
    else:
        assert delta["index"] == len(calls) - 1, "one call after the other"
        calls[-1]["function"]["arguments"] += delta["function"]["arguments"]


@pytest.fixture(scope="session")
def read_stream() -> Callable[..., ReadStream]:
    """Post a streaming request (server, path, fields) and check the whole reply."""

    def read(served: Served, path: str, fields: dict[str, Any]) -> ReadStream:
        reply = served.http.post(path, json={**fields, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers
        prompts = fields.get("prompt", "")
        num_prompts = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
        return check_stream(
            reply.content,
            chat=path.startswith("/v1/chat"),
            n=num_prompts * fields.get("n", 1),
            include_usage=(fields.get("stream_options") or {}).get("include_usage", False),
        )

    return read


@pytest.fixture(scope="session", name="conforms")
def _conforms() -> Callable[[str, Any], None]:
    """Hold a value against a schema of the OpenAPI document, by name."""
    return conforms


@pytest.fixture(scope="session")
def error_of() -> Callable[[httpx.Response], dict[str, Any]]:
    """Check that a response holds an error object and return it."""
    return lambda response: check_error(response.json())
