"""A scripted engine behind a real server on loopback, and a strict reader of what comes back."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from optimc_runtime.server import HttpServer, ServerOptions, build_app

from .real_server import RealServer, running
from .scripted_engine import Script, ScriptedEngine, TurnTemplate
from .stream_reader import ReadStream, check_error, check_stream, conforms

MODEL = "scripted"


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


@pytest.fixture
def real(scripted: Any) -> Iterator[RealServer]:
    """A server on a real engine with a scripted model; nothing may be left running at the end of the test."""
    with running(scripted) as server:
        yield server
        server.check_idle()


@pytest.fixture
def start_real(scripted: Any) -> Callable[..., Any]:
    """Return a context manager running a real engine of one's own: options of the plan and `config`."""
    return lambda **options: running(scripted, **options)
