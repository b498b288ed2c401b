"""Ten thousand hostile requests and whatever the OpenAPI document suggests, against one server: zero 5xx.

    python benchmarks/serving_fuzz.py PLAN [--requests 10000] [--quick]

First schemathesis (`pip install optimc[fuzz]`) holds the server against its own document, then raw bytes of every kind
follow, while a healthy client streams beside them. Exits with 1 if a verdict is bad.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from serving_hostile import Hostile
from serving_load import HERE, Reply, Server, ask, mark, request, serving, total, write_report

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CLIENTS = 16
ANSWER_WITHIN_S = 60
HEALTHY = {"prompt": "Water boils at", "max_tokens": 8, "temperature": 0, "stream": True}
OPTIONS = ("--max-output-tokens", "8", "--chat-template", str(HERE / "prompts" / "tools.jinja"))


@dataclass
class Fuzzed:
    """What came of the hostile requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    """0: the connection was closed without an answer."""
    bad: list[str] = field(default_factory=list)
    """Every request with a 5xx, or without any end."""
    slowest_s: float = 0.0
    healthy_texts: Counter[str] = field(default_factory=Counter)
    """What the healthy client got, which must be one text."""
    longest_gap_s: float = 0.0
    """Between two events of the healthy client."""


def fuzz_document(server: Server, folder: Path, examples: int, seed: int, phases: str) -> tuple[int, str]:
    """Run schemathesis; return the number of its cases and what it found wrong, "" for nothing."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
    command += ["--max-examples", str(examples), "--seed", str(seed), "--phases", phases]
    # Cases cost steps of the engine; that one takes long is not what is looked for.
    command += ["--suppress-health-check", "all", "--request-timeout", str(ANSWER_WITHIN_S), "--no-color"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # it leaves files there
    cases = re.search(r"([\d,]+) generated", done.stdout)
    if cases is None:
        return 0, done.stdout + done.stderr
    return int(cases[1].replace(",", "")), "" if done.returncode == 0 else done.stdout


async def fuzz_bytes(server: Server, requests: int, seed: int) -> Fuzzed:
    """Send so many hostile requests from several clients, and stream beside them."""
    found = Fuzzed()
    hostile = Hostile(seed)
    left = iter(range(requests))

    async def attack() -> None:
        for number in left:
            data = hostile.draw()
            started_s = time.perf_counter()
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    reply = await ask(server.address, data)
            except Exception as error:
                found.bad.append(f"{number}: {type(error).__name__}: {error}: {data[:500]!r}")
                continue
            found.slowest_s = max(found.slowest_s, time.perf_counter() - started_s)
            found.statuses[reply.status] += 1
            if reply.status >= 500:
                found.bad.append(f"{number}: {reply.status} {reply.body[:300]!r}: {data[:500]!r}")

    async def stream() -> None:
        while True:
            reply = await ask(server.address, request("/v1/completions", HEALTHY))
            found.healthy_texts[_text(reply)] += 1
            times_s = [arrived_s for arrived_s, _ in reply.events]
            gaps_s = (later_s - earlier_s for earlier_s, later_s in itertools.pairwise(times_s))
            found.longest_gap_s = max(found.longest_gap_s, *gaps_s, 0.0)

    healthy = asyncio.create_task(stream())
    await asyncio.gather(*(attack() for _ in range(CLIENTS)))
    healthy.cancel()
    await asyncio.gather(healthy, return_exceptions=True)
    if not healthy.cancelled():
        found.bad.append(f"the healthy client: {healthy.exception()!r}")
    return found


def _text(reply: Reply) -> str:
    """Return the text of a stream that has ended well."""
    assert reply.is_finished, f"{reply.status} {reply.body!r} {reply.events[-1:]}"
    return "".join(choice["text"] for chunk in reply.chunks() for choice in chunk["choices"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--examples", type=int, default=100, help="schemathesis' examples per operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="little of each, to see that it works")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving-fuzz.md")
    options = parser.parse_args()
    examples, requests = (2, 300) if options.quick else (options.examples, options.requests)
    phases = "fuzzing" if options.quick else "examples,coverage,fuzzing"
    with tempfile.TemporaryDirectory() as folder, serving(options.plan, Path(folder), *OPTIONS) as server:
        cases, complaint = fuzz_document(server, Path(folder), examples, options.seed, phases)
        found = asyncio.run(fuzz_bytes(server, requests, options.seed))
        time.sleep(1)
        metrics = server.metrics()
        held = total(metrics, "optimc_requests_running") + total(metrics, "optimc_requests_waiting")
        status = server.stop()
    statuses = ", ".join(f"{count:,} times {status or 'hung up'}" for status, count in sorted(found.statuses.items()))
    rows = [
        (
            f"schemathesis on the OpenAPI document, {cases:,} cases",
            "see above" if complaint else "nothing",
            not complaint,
        ),
        (f"{requests:,} hostile requests: 5xx or no end", str(len(found.bad)), not found.bad),
        (
            f"different answers among {found.healthy_texts.total():,} of a healthy client",
            str(len(found.healthy_texts)),
            len(found.healthy_texts) == 1,
        ),
        ("running, waiting and KV in use afterwards", f"{held:g}", held + metrics["optimc_kv_usage_ratio"] == 0),
        ("the server's exit status", str(status), status == 0),
    ]
    print(complaint, "\n".join(found.bad[:20]), sep="\n")
    for what, figure, is_good in rows:
        print(f"{what}: {figure} ({mark(is_good)})")
    lines = ["| | | |", "|---|---|---|", *(f"| {what} | {figure} | {mark(good)} |" for what, figure, good in rows)]
    lines += [
        "",
        f"Answers: {statuses}. The slowest took {found.slowest_s:.2f} s; the healthy client's longest gap was",
    ]
    lines += [f"{found.longest_gap_s:.2f} s. Seed {options.seed}."]
    write_report(options.output, "Serving: fuzz", options.plan, lines)
    return 0 if all(is_good for _, _, is_good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
