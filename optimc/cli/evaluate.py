"""`optimc eval`: what a plan lost against the model it was built from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from optimc.cli import options
from optimc.cli.progress import progress_bar
from optimc.errors import MeasureError


def evaluate(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="An engine.plan.", show_default=False)],
    against: Annotated[
        str | None, typer.Option("--against", help="Model to compare with; the one the plan was built from by default.")
    ] = None,
    windows: options.Windows = 16,
    length: options.Length = 512,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the original model bring its own Python code.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Write the figures into the plan; `optimc inspect` shows them.")
    ] = False,
    cache_dir: options.CacheDir = None,
    kv_memory: options.KvMemory = None,
    max_step_tokens: options.MaxStepTokens = None,
    threads: options.Threads = None,
    prefix_cache: options.PrefixCache = True,
    chunked_prefill: options.ChunkedPrefill = True,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Perplexity, KL divergence and top-1 agreement, teacher-forced through the engine as it serves."""
    from rich.console import Console

    from optimc.build import BuildOptions, require_compiler
    from optimc.cli.engine_options import load_engine
    from optimc.measure.evaluation import eval_plan
    from optimc.plan import Plan, record_quality

    require_compiler("comparing a plan with the original model")
    with Plan.open(plan_path) as plan:
        engine = load_engine(
            plan,
            kv_memory=kv_memory,
            max_step_tokens=max_step_tokens,
            threads=threads,
            prefix_cache=prefix_cache,
            chunked_prefill=chunked_prefill,
            trust=trust,
        )
        try:
            with progress_bar() as progress:
                result = eval_plan(
                    engine,
                    plan,
                    cache_dir=BuildOptions(cache_dir=cache_dir).cache,
                    against=against,
                    windows=windows,
                    length=length,
                    trust_remote_code=trust_remote_code,
                    progress=progress,
                )
        finally:
            engine.close()
    if record:
        quality = result.to_quality()
        if quality is None:
            raise MeasureError(f"nothing to record: {result.note}")
        record_quality(plan_path, quality)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        Console().print(result.table())
