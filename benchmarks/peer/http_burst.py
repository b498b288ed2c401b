"""Requests to a server on this machine, all at once, whole answers: what a client needs least of the cores for."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from peer.burst import Burst, RequestTimes
from peer.worker import PeerError

TIMEOUT_S = 300.0


def http_burst(
    url: str, path: str, bodies: Sequence[dict[str, Any]], count_tokens: Callable[[dict[str, Any]], int]
) -> Burst:
    """POST every body at the same time; `count_tokens` reads the tokens made off an answer. Raises PeerError if the
    server refuses one."""
    address = urlsplit(url)
    encoded = [json.dumps(body).encode() for body in bodies]
    started_s = time.perf_counter()

    def send(body: bytes) -> RequestTimes:
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{path}: {error!r}") from error
        finally:
            connection.close()
        end_s = time.perf_counter() - started_s
        if response.status != 200:
            raise PeerError(f"{path}: {response.status} {text[:300]!r}")
        return RequestTimes(None, end_s, count_tokens(json.loads(text)))

    with ThreadPoolExecutor(len(encoded)) as pool:
        return Burst(tuple(pool.map(send, encoded)))


def free_port() -> int:
    """Return a port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
