"""`optimc compare`: recipes and plans on one latency/quality table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.progress import progress_bar
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from optimc.build import BuildOptions


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
    from rich.console import Console

    from optimc.build import BuildOptions, build_recipe, require_compiler
    from optimc.cli.engine_options import load_engine
    from optimc.measure.compare.compare_plans import CompareConfig
    from optimc.measure.compare.compare_plans import compare as compare_plans

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
    build_options = BuildOptions(overrides=tuple(overrides or ()), cache_dir=cache_dir, output_dir=output_dir)
    names = check_items(items, build_options)
    with progress_bar() as progress:

        def build(recipe: Path) -> Path:
            name = names[recipe]
            return build_recipe(
                recipe, build_options, progress=lambda done, total, label: progress(done, total, f"{name}: {label}")
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


def check_items(items: Sequence[Path], options: BuildOptions) -> dict[Path, str]:
    """Return each recipe's name. Looks at every recipe and plan, so that no build begins beside one that cannot be.

    Raises ConfigError with the faults of all.
    """
    from optimc.build import read_inputs
    from optimc.errors import PlanError
    from optimc.measure.compare.compare_plans import RECIPE_SUFFIXES
    from optimc.plan import Plan

    faults: list[Fault] = []
    names: dict[Path, str] = {}
    for item in dict.fromkeys(items):
        try:
            if item.suffix.lower() in RECIPE_SUFFIXES:
                inputs = read_inputs(item, options)
                twin = next((other for other, name in names.items() if name == inputs.recipe.name), None)
                if twin is not None:
                    faults.append(Fault(str(item), f"has the name of {twin}; both would be {inputs.output}"))
                names[item] = inputs.recipe.name
            else:
                with Plan.open(item):
                    pass
        except ConfigError as error:
            faults += [Fault(f"{item}: {fault.where}", fault.message, fault.line) for fault in error.faults]
        except PlanError as error:
            faults.append(Fault("", str(error)))
    if faults:
        raise ConfigError("nothing was built", faults)
    return names


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("options", [Fault("--concurrency", f"'{text}' is not a list like 1,8")]) from None
