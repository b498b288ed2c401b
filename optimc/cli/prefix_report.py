"""`optimc prefix-report`: what kept requests from sharing their prefix."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from optimc.cli import options
from optimc.errors import ConfigError, Fault


def prefix_report(
    traffic_path: Annotated[
        Path,
        typer.Argument(
            metavar="TRAFFIC",
            help="Requests, one JSON object a line, as `optimc serve --log-traffic` writes them; OpenAI batch files "
            'and lines with "messages" or "prompt" are read too.',
            show_default=False,
        ),
    ],
    plan_path: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Count in the tokens of this engine.plan, behind its chat template. Without, four characters count "
            "as a token.",
            show_default=False,
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option("--block-size", help="Tokens of a cache block; the plan's, or 16.", show_default=False),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            help="Tokens the server's KV cache holds: also show what it could have kept. Unlimited by default.",
            show_default=False,
        ),
    ] = None,
    prefill_tokens_per_s: Annotated[
        float | None,
        typer.Option(
            "--prefill-tokens-per-s",
            help="How fast the server computes prompts, to turn tokens into seconds. From the log's times to the first "
            "token by default, if it has them.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Most killers the table shows; --json shows all.")] = 10,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave out the examples: 40 characters of two prompts for each killer.")
    ] = False,
    fail_on_killer: Annotated[
        bool, typer.Option("--fail-on-killer", help="Exit with code 1 if anything is found, as for a CI job.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show which requests could have shared their prefix, what kept them from it, and the edit that would help.

    A prefix killer is a difference before text that many requests share: a time, an id, tools or keys in another order,
    other whitespace, the user's own text, the chat template. What is behind it is computed again for every request.
    """
    _check(block_tokens, kv_tokens, prefill_tokens_per_s, top)

    from optimc.measure.load.traffic import read_traffic
    from optimc.measure.prefix.plan_rendering import PlanRendering
    from optimc.measure.prefix.prefix_report import prefix_report as make_report
    from optimc.measure.prefix.rendered import render
    from optimc.plan import Plan

    lines = list(read_traffic(traffic_path))
    with ExitStack() as stack:
        plan = None if plan_path is None else stack.enter_context(Plan.open(plan_path))
        report = make_report(
            lines,
            rendering=render if plan is None else PlanRendering.from_plan(plan),
            block_tokens=block_tokens or (16 if plan is None else plan.manifest.kv.block_size),
            kv_tokens=kv_tokens,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
    if redact:
        report = report.redacted()
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.table(top))
    if fail_on_killer and report.killers:
        raise typer.Exit(1)


def _check(block_tokens: int | None, kv_tokens: int | None, prefill_tokens_per_s: float | None, top: int) -> None:
    """Raise ConfigError with every option that is out of range."""
    given = {
        "--block-size": block_tokens,
        "--kv-tokens": kv_tokens,
        "--prefill-tokens-per-s": prefill_tokens_per_s,
        "--top": top,
    }
    faults = [
        Fault(name, f"must be more than 0, got {value:g}")
        for name, value in given.items()
        if value is not None and not 0 < value < float("inf")
    ]
    if faults:
        raise ConfigError("options", faults)
