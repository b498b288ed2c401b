"""Half an hour of everything at once in front of one server: does anything leak, hang, or end up in the wrong place?

    python benchmarks/serving_soak.py PLAN [--minutes 30] [--quick]

Lengths, aborts, disconnects, bad requests, bursts, grammars and tools, from several clients with two API keys, on the
loopback. Exits with 1 if a verdict is bad. README.md says what is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from serving_load import HERE, Reply, Server, ask, mark, request, serving, total, write_report
from serving_mix import CANARY, COMPLETIONS, Errand, Mix

from optimc_runtime.server.serve import worker_threads

KEYS = {"blue": "blue-0123456789abcdef", "green": "green-0123456789abcdef"}
PINNED = "You are a patient assistant who answers briefly. " * 4
SAMPLE_S = 5.0
BURST = 60
"""Requests of a burst: more than may wait, so some must be refused."""
MAX_WAITING = 24
ANSWER_WITHIN_S = 580
"""Less than the server's own `--request-timeout`."""
FLAT_BYTES_PER_S = 1e6 / 600
"""Growth that is no leak whatever its error: 1 MB in ten minutes."""
REMEMBERED_WORDS = 10_000
"""The tokenizers library keeps how it split so many, four megabytes of them."""
EVICTED = "optimc_prefix_cache_evicted_blocks_total"
SETTLED = 0.2
"""Share of the run that fills caches and pools, and does not count."""


@dataclass
class Sample:
    """What the process holds at one moment."""

    at_s: float
    resident_bytes: int
    files: int
    threads: int


@dataclass
class Soak:
    """What has happened so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind of errand, how it ended) to how often."""
    wrong: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """One thing that was looked at."""

    what: str
    found: str
    is_good: bool


def outcome(errand: Errand, reply: Reply) -> str:
    """Return how an errand ended, in a word. Raises AssertionError for an end it must not have."""
    assert reply.status < 500, f"{reply.status}: {reply.body[:300]!r}"
    if errand.leave_after is not None:
        return "left"
    if errand.kind == "hostile":
        return "answered" if reply.status == 200 else "refused as bad"
    if reply.status == 429:
        assert int(reply.headers["retry-after"]) >= 1
        return "refused as too much"
    assert reply.status == 200, f"{reply.status}: {reply.body[:300]!r}"
    assert errand.check is not None
    errand.check(reply)
    return "finished"


async def do(server: Server, errand: Errand, soak: Soak) -> None:
    """Do one errand and note its end."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            reply = await ask(server.address, errand.data, leave_after=errand.leave_after)
        soak.outcomes[errand.kind, outcome(errand, reply)] += 1
    except Exception as error:
        soak.outcomes[errand.kind, "WRONG"] += 1
        soak.wrong.append(f"{errand.kind}: {type(error).__name__}: {error}")


async def client(server: Server, mix: Mix, pause: Random, until_s: float, soak: Soak) -> None:
    """Do errands one after the other, now and then with a pause."""
    while time.monotonic() < until_s:
        await do(server, mix.draw(), soak)
        await asyncio.sleep(pause.choice((0, 0, 0.1, 0.5)))


async def bursts(server: Server, mix: Mix, every_s: float, until_s: float, soak: Soak) -> None:
    """Now and then, send many requests at the same moment."""
    while time.monotonic() + every_s < until_s:
        await asyncio.sleep(every_s)
        await asyncio.gather(*(do(server, mix.draw(), soak) for _ in range(BURST)))


async def watch(server: Server, until_s: float, soak: Soak) -> None:
    """Look at the process every few seconds, and fail if it is gone."""
    while time.monotonic() < until_s:
        assert server.process.poll() is None, f"the server has ended: {server.log.read_text()[-2000:]}"
        soak.samples.append(Sample(time.monotonic(), **server.resources()))
        await asyncio.sleep(SAMPLE_S)


async def run(server: Server, minutes: float, clients: int, longest: int) -> Soak:
    """Run clients, bursts and watch together for so long."""
    key = KEYS["blue"]
    first = await ask(server.address, request(COMPLETIONS, CANARY, key=key))
    assert first.status == 200, first.body
    canary = first.json()["choices"][0]["text"]
    # What the heaviest moments need is taken when they first come, and kept: at once, or it would look like a leak.
    scored = {"prompt": [100] * longest, "echo": True, "logprobs": 1, "max_tokens": 0}
    reply = await ask(server.address, request(COMPLETIONS, scored, key=key))
    assert reply.status == 200, reply.body
    crowd = (
        {"prompt": [100 + at % (150 + number) for at in range(longest)], "max_tokens": 32} for number in range(BURST)
    )
    replies = await asyncio.gather(*(ask(server.address, request(COMPLETIONS, body, key=key)) for body in crowd))
    assert {reply.status for reply in replies} <= {200, 429}
    letters, at_once = Random(0), longest // 10  # words of eight letters, each a token at worst, and a space
    for _ in range(0, REMEMBERED_WORDS + 1000, at_once):
        words = ("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(at_once))
        reply = await ask(server.address, request("/tokenize", {"prompt": " ".join(words)}, key=key))
        assert reply.status == 200, reply.body
    mixes = [
        Mix(number, longest=longest, key=list(KEYS.values())[number % len(KEYS)], canary=canary)
        for number in range(clients + 1)
    ]
    soak = Soak()
    until_s = time.monotonic() + 60 * minutes
    await asyncio.gather(
        *(client(server, mix, Random(number), until_s, soak) for number, mix in enumerate(mixes[1:])),
        bursts(server, mixes[0], min(45.0, 20 * minutes), until_s, soak),
        watch(server, until_s, soak),
    )
    return soak


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the slope of resident memory in bytes/s, and its standard error, once the run has settled.

    Neighbouring samples are alike, so the line is put through the means of twelve stretches of time.
    """
    begun_s, ended_s = samples[0].at_s, samples[-1].at_s
    settled = [sample for sample in samples if sample.at_s >= begun_s + SETTLED * (ended_s - begun_s)]
    parts = [part for part in np.array_split(np.array([(s.at_s, s.resident_bytes) for s in settled]), 12) if len(part)]
    times_s, sizes = np.array([part.mean(axis=0) for part in parts]).T
    centred = times_s - times_s.mean()
    if len(parts) < 3 or not centred.any():
        return 0.0, float("inf")
    slope = float(centred @ sizes / (centred @ centred))
    left = sizes - sizes.mean() - slope * centred
    return slope, float(np.sqrt(left @ left / (len(parts) - 2) / (centred @ centred)))


def course(samples: Sequence[Sample]) -> str:
    """Return the mean resident memory of each tenth of the run, in MB."""
    parts = [part for part in np.array_split([sample.resident_bytes / 1e6 for sample in samples], 10) if len(part)]
    return " ".join(f"{part.mean():.1f}" for part in parts)


def judge(
    soak: Soak, metrics: dict[str, float], lines: Sequence[dict[str, Any]], idle: Sequence[Sample]
) -> list[Verdict]:
    """Return what is to be said, from what clients saw, the server's figures and log, and it idle before and after."""
    slope, error = growth(soak.samples)
    resident = f"{slope * 600 / 1e6:+.2f} ± {2 * error * 600 / 1e6:.2f} MB in ten minutes"
    # A status of 499 is that of a client which has left; any other refuses what was asked.
    accepted = [line for line in lines if "answer_id" in line and not 400 <= line["status"] < 499]
    reasons: Counter[str | None] = Counter()
    for line in accepted:
        reasons.update(line["finish_reason"] if _is_many(line) else [line["finish_reason"]])
    # Of a request with three choices the third may find the queue full: refused as a whole, though two had been taken.
    begun = sum(len(line["finish_reason"]) for line in lines if line.get("status") == 429 and _is_many(line))
    ended: Counter[str | None] = Counter(
        {
            name: int(metrics[f'optimc_requests_total{{outcome="{name}"}}'])
            for name in ("stop", "length", "abort", "error")
        }
    )
    held = total(metrics, "optimc_requests_running") + total(metrics, "optimc_requests_waiting")
    used = round(metrics["optimc_kv_usage_ratio"] * metrics["optimc_kv_blocks"])
    pinned = int(metrics["optimc_prefix_cache_pinned_blocks"])
    failed = [line for line in lines if _tells_of_failure(line)]
    before, after = idle
    finished = sum(count for (_, how), count in soak.outcomes.items() if how == "finished")
    return [
        Verdict(
            "answers that were not as they had to be", f"{len(soak.wrong)} of {soak.outcomes.total():,}", not soak.wrong
        ),
        Verdict("lines of the log that tell of a 5xx or an error", str(len(failed)), not failed),
        Verdict(
            f"accepted choices by the log; by the metrics ({finished:,} requests finished by their clients)",
            f"{_counts(reasons)}; {_counts(ended)}",
            reasons - ended == Counter()
            and (ended - reasons).keys() <= {"abort"}
            and (ended - reasons).total() <= begun,
        ),
        Verdict("running or waiting once all have gone", f"{held:g}", held == 0),
        Verdict("blocks in use then, pinned ones", f"{used}, {pinned}", used == pinned),
        Verdict("resident memory", resident, abs(slope) <= max(FLAT_BYTES_PER_S, 2 * error)),
        Verdict("open files idle, before and after", f"{before.files}, {after.files}", after.files <= before.files),
        Verdict(
            "threads idle, before and after",
            f"{before.threads}, {after.threads}",
            after.threads <= before.threads + worker_threads(),
        ),
    ]


def _tells_of_failure(line: dict[str, Any]) -> bool:
    return line.get("status", 0) >= 500 or line.get("level") in ("error", "critical")


def _is_many(line: dict[str, Any]) -> bool:
    return isinstance(line.get("finish_reason"), list)


def _counts(reasons: Counter[str | None]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items(), key=str) if count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--longest", type=int, default=1500, help="most tokens of a prompt")
    parser.add_argument("--kv-memory", default="160MiB", help="little enough that requests are put back")
    parser.add_argument("--quick", action="store_true", help="some seconds, to see that it works")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "serving-soak.md")
    options = parser.parse_args()
    minutes = 0.2 if options.quick else options.minutes
    with tempfile.TemporaryDirectory() as folder:
        soak, metrics, lines, idle = _soak(options, Path(folder), minutes)
    verdicts = judge(soak, metrics, lines, idle)
    soak.wrong += [f"log: {line}" for line in lines if _tells_of_failure(line)]
    for verdict in verdicts:
        print(f"{verdict.what}: {verdict.found} ({mark(verdict.is_good)})")
    print("\n".join(soak.wrong[:20]))
    table = ["| | | |", "|---|---|---|"]
    table += [f"| {verdict.what} | {verdict.found} | {mark(verdict.is_good)} |" for verdict in verdicts]
    table += ["", "| errand | end | times |", "|---|---|---:|"]
    table += [f"| {kind} | {how} | {count:,} |" for (kind, how), count in sorted(soak.outcomes.items())]
    table += ["", f"{minutes:g} minutes, {options.clients} clients and bursts of {BURST}; preemptions"]
    table[-1] += f" {metrics['optimc_preemptions_total']:,.0f}, blocks evicted {total(metrics, EVICTED):,.0f}."
    table += [
        "",
        f"Resident memory on the way, MB: {course(soak.samples)}. A leak rises evenly, an allocator ever less.",
    ]
    write_report(options.output, "Serving: soak", options.plan, table)
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


def _soak(
    options: argparse.Namespace, folder: Path, minutes: float
) -> tuple[Soak, dict[str, float], list[Any], list[Sample]]:
    keys, pinned = folder / "keys", folder / "pinned.txt"
    keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    keys.chmod(0o600)
    pinned.write_text(PINNED)
    given = ["--api-key-file", keys, "--pin-prefix", pinned, "--policy", "priority", "--kv-memory", options.kv_memory]
    given += ["--max-queued-requests", MAX_WAITING, "--chat-template", HERE / "prompts" / "tools.jinja"]
    given += ["--max-output-tokens", 128]
    with serving(options.plan, folder, *map(str, given), key=KEYS["blue"]) as server:
        idle = [Sample(time.monotonic(), **server.resources())]
        soak = asyncio.run(run(server, minutes, options.clients, options.longest))
        deadline_s = time.monotonic() + 60
        while total(server.metrics(), "optimc_requests_running") and time.monotonic() < deadline_s:
            time.sleep(0.2)
        metrics = server.metrics()
        time.sleep(10)  # connections that nobody uses, this one too, are closed by then
        idle.append(Sample(time.monotonic(), **server.resources()))
        status = server.stop()
        if status != 0:
            soak.wrong.append(f"the server ended with {status}")
        lines = server.log_lines()
    return soak, metrics, lines, idle


if __name__ == "__main__":
    sys.exit(main())
