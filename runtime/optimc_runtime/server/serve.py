"""Running the application: one process, one port, a clean way in and out."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from anyio.to_thread import current_default_thread_limiter

from optimc.errors import ConfigError, Fault
from optimc_runtime.executor.cores import usable_cores
from optimc_runtime.server.app import build_app
from optimc_runtime.server.client import EngineClient, PromptTemplate
from optimc_runtime.server.connection import DeadlineProtocol
from optimc_runtime.server.context import GRAMMAR_SLOTS, ServerContext
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.watchdog import watch

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

OnReady = Callable[[str], None]
"""Called once with the server's base URL when it accepts connections."""


ABORT_GRACE_S = 5
"""How long aborted requests may take to tell their clients: a step of the engine, and the way back."""

_POLL_S = 0.05


class HttpServer:
    """A bound port and the loop that will answer on it, for an app of `build_app`. Raises ConfigError if the address
    cannot be had.

    The port is taken on construction, so `url` is final even for port 0.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        drain_timeout_s: int = 30,
        on_ready: OnReady | None = None,
    ) -> None:
        self._socket = _listen(host, port)
        address, bound_port = self._socket.getsockname()[:2]
        self.url = f"http://[{address}]:{bound_port}" if ":" in address else f"http://{address}:{bound_port}"
        config = uvicorn.Config(
            _ending_quietly(app),
            loop="asyncio",
            http=DeadlineProtocol,
            ws="none",
            lifespan="off",
            # Logging belongs to the program that embeds the server.
            log_config=None,
            access_log=False,
            # The peer's own word about its address would end up in logs only, and should not.
            proxy_headers=False,
            server_header=False,
            # What is left by then is no request for work, or has been aborted.
            timeout_graceful_shutdown=ABORT_GRACE_S,
        )
        self._server = _DrainingServer(
            config,
            on_started=lambda: on_ready(self.url) if on_ready is not None else None,
            context=app.state.context,
            drain_timeout_s=drain_timeout_s,
        )

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`; then refuse new requests and finish what runs, or time out.

        Signals are handled in the main thread only. A second SIGINT ends at once. Returns normally in each case.
        """
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Begin to drain. May be called from any thread."""
        self._server.should_exit = True


def serve(
    engine: EngineClient,
    *,
    model_name: str,
    chat_template: PromptTemplate | None = None,
    options: ServerOptions | None = None,
    keys: KeyRing | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    drain_timeout_s: int = 30,
    on_ready: OnReady | None = None,
) -> None:
    """Serve a started engine until SIGTERM or SIGINT, then drain for up to `drain_timeout_s` and return.

    Raises ConfigError if `host:port` cannot be bound. The engine stays the caller's to close.
    """
    app = build_app(engine, model_name=model_name, chat_template=chat_template, options=options, keys=keys)
    HttpServer(app, host=host, port=port, drain_timeout_s=drain_timeout_s, on_ready=on_ready).run()


def worker_threads() -> int:
    """Return how many threads encode prompts and compile grammars, beside the event loop's and the engine's.

    Their work is the processor's, so that more of them would take memory and gain nothing; of grammars, each of which
    can hold a thread for seconds, there are never as many.
    """
    return usable_cores() + GRAMMAR_SLOTS


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if `host:port` cannot be bound now: worth knowing before a model is loaded for it."""
    _listen(host, port).close()


class _DrainingServer(uvicorn.Server):
    """uvicorn, but: it returns to its caller after a signal instead of raising the signal once more, still answers
    while what runs finishes (so that probes and clients hear "draining" instead of nothing), and tells clients when it
    does not wait for their answers any longer."""

    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[], None], context: ServerContext, drain_timeout_s: int
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._context = context
        self._drain_timeout_s = drain_timeout_s
        self._watching: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        current_default_thread_limiter().total_tokens = worker_threads()
        await super().startup(sockets)
        self._watching = asyncio.create_task(watch(self._context))
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.begin_drain()
        await self._finished(within_s=self._drain_timeout_s)
        self._context.abort_all()
        await self._finished(within_s=ABORT_GRACE_S)
        if self._watching is not None:
            self._watching.cancel()
        await super().shutdown(sockets)

    async def _finished(self, *, within_s: float) -> None:
        """Return once nothing is being answered, or a second Ctrl-C came, or time is up."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while self._context.phase.active and not self.force_exit and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _ending_quietly(app: ASGIApp) -> ASGIApp:
    """Wrap `app`: a reply that is cancelled, as by a second Ctrl-C, is no fault whose traceback belongs in the log."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            return

    return answer


def _listen(host: str, port: int) -> socket.socket:
    # Left to the system's resolver, 70000 becomes 4464.
    if not 0 <= port <= 65535:
        raise ConfigError("server", [Fault("port", f"must be between 0 and 65535, got {port}")])
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("server", [Fault("host", f"{host}: {error.strerror or error}")]) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        field = "host" if error.errno == errno.EADDRNOTAVAIL else "port"
        fault = Fault(field, f"cannot listen on {host}:{port}: {error.strerror}; choose another --{field}")
        raise ConfigError("server", [fault]) from None
    listener.set_inheritable(False)
    return listener
