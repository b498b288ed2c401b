"""Options several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from optimc.byte_size import parse_bytes
from optimc.errors import ConfigError, Fault


def bytes_option(value: str | None, name: str) -> int | None:
    """Turn "512MiB" into bytes. Raises ConfigError naming the option."""
    if value is None:
        return None
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError("options", [Fault(name, str(error))]) from error


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
