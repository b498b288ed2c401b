"""`optimc compare`: recipes and plans on one latency/quality table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from optimc.cli import options
from optimc.cli.progress import progress_bar
from optimc.errors import ConfigError, Fault


def compare(
    items: Annotated[
        list[Path], typer.Argument(metavar="RECIPE|PLAN...", help="Recipes are built if need be.", show_default=False)
    ],
    overrides: options.Set = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where recipes' plans are, or are put.")] = Path(),
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens")] = 128,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Numbers of clients, ascending, with commas.")
    ] = "1,8",
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests measured at each concurrency; max(8, 4 × it).")
    ] = None,
    windows: Annotated[int, typer.Option("--windows", help="Windows of evaluation text.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens per window.")] = 512,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured on this machine before.")
    ] = False,
    cache_dir: options.CacheDir = None,
    threads: options.Threads = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: options.Json = False,
) -> None:
    """Build what is missing, measure one plan at a time, print one row per plan and mark the Pareto front.

    Exits with code 1 if a plan fails a quality gate of its recipe.
    """
    from optimc.build import BuildOptions, build_recipe, read_inputs, require_compiler
    from optimc.cli.engine_options import load_engine
    from optimc.measure.compare_plans import CompareConfig
    from optimc.measure.compare_plans import compare as compare_plans

    require_compiler("comparing plans with the original model")
    config = CompareConfig(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        concurrencies=_numbers(concurrency),
        requests=requests,
        windows=windows,
        length=length,
        threads=threads,
    )
    build_options = BuildOptions(overrides=tuple(overrides or ()), cache_dir=cache_dir)
    with progress_bar() as progress:

        def build(recipe_path: Path) -> Path:
            name = read_inputs(recipe_path, build_options).recipe.name
            output = output_dir / f"{name}.plan"
            placed = BuildOptions(output=output, overrides=build_options.overrides, cache_dir=cache_dir)
            return build_recipe(
                recipe_path, placed, progress=lambda done, total, label: progress(done, total, f"{name}: {label}")
            ).path

        result = compare_plans(
            items,
            config,
            build=build,
            open_engine=lambda path: load_engine(path, threads=threads),
            cache_dir=build_options.cache,
            fresh=fresh,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif markdown:
        typer.echo(result.markdown())
    else:
        Console().print(result.table())
    if not result.ok:
        raise typer.Exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("options", [Fault("--concurrency", f"'{text}' is not a list like 1,8")]) from None
