"""What the serving benchmarks share: `optimc serve` as a process, and a client that sees bytes as they come."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimc.measure.load.traffic import read_traffic
from optimc.measure.machine import read_machine
from optimc.measure.sse import SseParser

HERE = Path(__file__).parent

Address = tuple[str, int]


@dataclass
class Server:
    """A server process that is ready."""

    process: subprocess.Popen[str]
    url: str
    ready_s: float
    """From starting the process to its ready line."""
    log: Path
    """What it wrote to stderr: a JSON object per line."""
    key: str = ""
    """The API key to look at /metrics with, if the server has keys."""

    @property
    def address(self) -> Address:
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        return host, int(port)

    def resources(self) -> dict[str, int]:
        """Return resident bytes, open files and threads of the process, as Linux accounts them."""
        proc = Path("/proc") / str(self.process.pid)
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        return {
            "resident_bytes": int(fields["VmRSS"].split()[0]) * 1024,
            "files": len(list((proc / "fd").iterdir())),
            "threads": int(fields["Threads"]),
        }

    def metrics(self) -> dict[str, float]:
        """Return /metrics: sample name, labels included, to value."""
        asked = urllib.request.Request(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(asked, timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def log_lines(self) -> list[dict[str, Any]]:
        """Return the log's JSON objects; raises ValueError for a line that is none."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line]

    def stop(self) -> int:
        """Ask the process to end; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(plan: Path, folder: Path, *options: str, key: str = "") -> Iterator[Server]:
    """Run `optimc serve PLAN OPTIONS` on a free port; its log lies in `folder`.

    Raises RuntimeError if it does not start.
    """
    command = [sys.executable, "-m", "optimc", "serve", str(plan), "--port", "0", "--log-format", "json", *options]
    log = folder / f"serve-{time.monotonic_ns()}.log"
    with log.open("w") as errors:
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if " ready on " in line:
                break
        else:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
        ready_s = time.perf_counter() - started_s
        yield Server(process, line.split(" ready on ")[1].strip(), ready_s, log, key)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass
class Reply:
    """What a client saw of one answer."""

    status: int
    """0 if the client left, or was left, before a status line."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Of a stream: when each event's data came, in seconds of `time.perf_counter`."""

    def json(self) -> Any:
        return json.loads(self.body)

    def chunks(self) -> list[dict[str, Any]]:
        """Return the JSON of a stream's events, the end mark excluded."""
        return [json.loads(data) for _, data in self.events if data != "[DONE]"]

    @property
    def is_finished(self) -> bool:
        """Whether a stream came to its proper end."""
        return bool(self.events) and self.events[-1][1] == "[DONE]"


def request(path: str, body: bytes | Mapping[str, Any], *, method: str = "POST", key: str = "") -> bytes:
    """Return the bytes of one HTTP request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data


async def ask(address: Address, sent: bytes, *, leave_after: int | None = None, reply: Reply | None = None) -> Reply:
    """Send the bytes of a request on a connection of its own and read the answer, into `reply` if one is given.

    With `leave_after`, hang up after so many events of a stream; 0 means right after sending. A server that hangs up
    leaves what came; status 0 if that was nothing.
    """
    reply = Reply(0) if reply is None else reply
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    try:
        writer.write(sent)
        await writer.drain()
        if leave_after != 0:
            await _read_answer(reader, reply, leave_after)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return reply


async def _read_answer(reader: asyncio.StreamReader, reply: Reply, leave_after: int | None) -> None:
    while reply.status < 200:  # 100 only says that the body may come
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        reply.status = int(first.split(" ")[1])
    reply.headers.update((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
    if "content-length" in reply.headers:
        reply.body = await reader.readexactly(int(reply.headers["content-length"]))
        return
    parser = SseParser()
    while chunk := await _read_chunk(reader):
        now_s = time.perf_counter()
        reply.events += [(now_s, data) for data in parser.push(chunk)]
        if leave_after is not None and len(reply.events) >= leave_after:
            return


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readuntil(b"\r\n"), 16)
    return (await reader.readexactly(size + 2))[:-2]


def chat_prompts(count: int, first: int = 0, most_chars: int | None = None) -> list[list[dict[str, str]]]:
    """Return `count` conversations of the prompt files, from number `first` on and round again.

    `most_chars` cuts questions for models that take short ones only.
    """
    found = [list(prompt.messages) for kind in ("chat", "code") for prompt in read_traffic(_prompt_file(kind))]
    chosen = [found[(first + number) % len(found)] for number in range(count)]
    return [[{**turn, "content": turn["content"][:most_chars]} for turn in messages] for messages in chosen]


def _prompt_file(kind: str) -> Path:
    return HERE / "prompts" / f"{kind}.jsonl"


def total(metrics: Mapping[str, float], name: str) -> float:
    """Return the sum of a metric over its labels."""
    return sum(value for key, value in metrics.items() if re.fullmatch(rf"{name}(\{{.*\}})?", key))


def write_report(path: Path, title: str, plan: Path, lines: Sequence[str]) -> None:
    """Write a result as Markdown, with the machine and the day it was measured on."""
    measured = f"Measured {datetime.now(UTC):%Y-%m-%d} with {plan.name} on {read_machine()}."
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([f"# {title}", "", *lines, "", measured, ""]))


def mark(reached: bool) -> str:
    """Return how a verdict is shown."""
    return "✓ pass" if reached else "✗ fail"
