"""Options several commands share, declared once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from optimc.byte_size import parse_bytes
from optimc.errors import ConfigError, Fault

N = TypeVar("N", int, float)


def bytes_option(value: str | None, name: str) -> int | None:
    """Turn "512MiB" into bytes. Raises ConfigError naming the option."""
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError("options", [Fault(name, str(error))]) from error


def numbers_option(text: str, kind: type[N], name: str, example: str) -> tuple[N, ...]:
    """Read "1,8"; what is empty between commas is left out. Raises ConfigError naming the option."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(
            "options", [Fault(name, f"must be numbers with commas, as in {example}, got {text!r}")]
        ) from None


def seconds_option(minutes: float | None, name: str) -> float | None:
    """Turn minutes into seconds. Raises ConfigError naming the option."""
    if minutes is None:
        return None
    if not minutes > 0:  # a number that is none is not, either
        raise ConfigError("options", [Fault(name, f"must be above 0 minutes, got {minutes:g}")])
    return minutes * 60


@contextmanager
def faults_by_option(**names: str) -> Iterator[None]:
    """Let what is raised inside name the options that were given, not the fields that they became: `max_seqs` is
    --max-seqs, unless `names` has the field. Raises ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            "options", [replace(fault, where=_option_of(fault.where, names)) for fault in error.faults]
        ) from None


def _option_of(where: str, names: dict[str, str]) -> str:
    if where in names:
        return names[where]
    return where if not where or where.startswith("--") else f"--{where.replace('_', '-')}"


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise ConfigError("options", [Fault("--attain", f"must be a share above 0 and at most 1, got {value:g}")])
    return value


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
CacheDir = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Where built passes are kept; $OPTIMC_CACHE or .optimc-cache by default."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change the recipe: passes.rtn.bits=8, limits.max_seqs=16. May be repeated."),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh/--resume",
        help="Ignore what earlier builds left in the cache, or go on from it. A killed fresh build leaves nothing.",
    ),
]
MaxHostBytes = Annotated[
    str | None,
    typer.Option(
        "--max-host-bytes",
        help="Most memory the build may take, for example 4GiB: obeyed, or refused up front with what is needed.",
    ),
]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt.")]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help="Tokens of each answer.")]
Clients = Annotated[
    int | None,
    typer.Option("--concurrency", help="Closed loop: clients, each with one request at a time; 1 by default."),
]
ClientCounts = Annotated[
    str, typer.Option("--concurrency", help="Numbers of clients, ascending, with commas; each is measured.")
]
Slo = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="NAME=MS",
        help="Limits that a request must keep, in milliseconds: --slo ttft=500 tpot=40 e2e=9000.",
        show_default=False,
    ),
]
Attain = Annotated[
    float, typer.Option("--attain", callback=_share, help="Share of requests that must keep --slo for a rate to pass.")
]
Windows = Annotated[int, typer.Option("--windows", help="Windows of evaluation text.", min=1)]
WindowsOrNone = Annotated[
    int, typer.Option("--windows", help="Windows of evaluation text; 0 measures no quality.", min=0)
]
Length = Annotated[int, typer.Option("--length", help="Tokens per window.", min=2)]
MaxSeqs = Annotated[int | None, typer.Option("--max-seqs", help="Most sequences in a step; at most the plan's.")]
MaxStepTokens = Annotated[
    int | None, typer.Option("--max-step-tokens", help="Token budget of a step; at most the plan's.")
]
KvMemory = Annotated[str | None, typer.Option("--kv-memory", help="Size of the KV pool, for example 512MiB.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Compute threads; all cores by default.", min=1)]
PrefixCache = Annotated[bool, typer.Option(help="Reuse K/V of prompts that begin alike.")]
ChunkedPrefill = Annotated[bool, typer.Option(help="Split long prompts over several steps.")]
InflightBatching = Annotated[bool, typer.Option(help="Let requests join and leave a running batch.")]
Trust = Annotated[bool, typer.Option("--trust", help="Skip the SHA-256 check of the plan's tensors at load.")]
Speculation = Annotated[
    str | None,
    typer.Option(
        "--speculation",
        metavar="MODE",
        help="Who guesses tokens ahead, to be verified several at a time: auto (Medusa heads, if the plan has them, "
        "and n-grams of the text), medusa, ngram, draft=PLAN (another plan with the same tokenizer), or off. Answers "
        "stay the same.",
        show_default=False,
    ),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="The same as --speculation off.")]
LossyAcceptance = Annotated[
    str | None,
    typer.Option(
        "--lossy-acceptance",
        metavar="typical",
        help="Also accept guesses that are merely likely (2401.10774): faster above temperature 0, but answers are no "
        "longer distributed as plain sampling's.",
        show_default=False,
    ),
]
TypicalEpsilon = Annotated[
    float | None, typer.Option("--typical-epsilon", help="A guess at least this likely is accepted; 0.09.")
]
TypicalDelta = Annotated[
    float | None, typer.Option("--typical-delta", help="So is one above this times exp(-entropy); 0.3.")
]
