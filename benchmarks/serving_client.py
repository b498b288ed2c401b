"""Streams read as cheaply as can be, in a process of their own: on few cores a client takes time from the server.

    python benchmarks/serving_client.py HOST PORT PATH < BODIES

A body per line, each sent on a connection of its own, all at once. Prints JSON: `seconds` from the first byte sent to
the end of the last answer, and `tokens`, the output by the usage chunks, which the bodies must ask for.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Sequence

TAIL_BYTES = 2048
"""Enough for the usage chunk, the end mark and the end of the body."""


def read_streams(host: str, port: int, path: str, bodies: Sequence[str]) -> dict[str, float]:
    """Send every body and read all answers to their ends. Raises RuntimeError for an answer that is no whole stream."""
    tails: dict[socket.socket, bytes] = {}
    tokens = 0
    started_s = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            connection = socket.create_connection((host, port))
            head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body.encode())}\r\n\r\n"
            connection.sendall((head + body).encode())
            tails[connection] = b""
            selector.register(connection, selectors.EVENT_READ, connection)
        while tails:
            for key, _ in selector.select():
                connection = key.data
                received = connection.recv(1 << 16)
                tails[connection] = tail = (tails[connection] + received)[-TAIL_BYTES:]
                if received and not tail.endswith(b"0\r\n\r\n") and b"Content-Length" not in tail:
                    continue
                counted = re.findall(rb'"completion_tokens":\s?(\d+)', tail)
                if b"[DONE]" not in tail or not counted:
                    raise RuntimeError(f"no whole stream: {tail.decode(errors='replace')}")
                tokens += int(counted[-1])
                selector.unregister(connection)
                connection.close()
                del tails[connection]
    return {"seconds": time.perf_counter() - started_s, "tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(read_streams(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.stdin.read().splitlines())))
