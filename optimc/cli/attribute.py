"""`optimc attribute`: what each pass and each feature of the runtime gained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.ignored_options import ignored_options
from optimc.cli.output_file import check_output, write_output
from optimc.cli.progress import progress_bar
from optimc.cli.slo_option import parse_slo
from optimc.cli.switched_engines import climb, open_switched, plan_quality
from optimc.errors import ConfigError

if TYPE_CHECKING:
    from optimc.build import BuildOptions
    from optimc.measure.attribution.attribution import Attribution
    from optimc.measure.attribution.config import AttributeConfig
    from optimc.measure.attribution.recipe_file import RecipeFile
    from optimc.measure.attribution.variants import Variant
    from optimc.progress import Progress

VARIANTS = "attribution"
"""Folder in the cache that holds variants' plans: nobody serves them, and they are rebuilt when they are gone."""


def attribute(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe in YAML.", show_default=False)],
    overrides: options.Set = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="leave-one-out|cumulative|both",
            help="leave-one-out: the recipe against itself without each factor. cumulative: each factor on top of "
            "those before it, from the bare model up.",
        ),
    ] = "both",
    pairs: Annotated[
        int, typer.Option("--pairs", help="Rounds of four blocks (with, without, without, with); 3 at least.")
    ] = 4,
    concurrency: options.ClientCounts = "1,8",
    prompt_tokens: options.PromptTokens = 512,
    output_tokens: options.OutputTokens = 64,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests measured in each block; max(8, 4 × clients).", show_default=False),
    ] = None,
    budget_minutes: Annotated[
        float | None,
        typer.Option(
            "--budget-minutes",
            help="Time for everything, builds included. What does not fit is cut, and the report says what: first "
            "pairs, then requests, then factors from the end.",
            show_default=False,
        ),
    ] = None,
    knee: Annotated[
        bool,
        typer.Option(
            "--knee", help="Also find the highest rate of requests that keeps --slo, for every variant. Long."
        ),
    ] = False,
    slo: options.Slo = None,
    attain: options.Attain = 0.95,
    speculation: options.Speculation = None,
    windows: options.WindowsOrNone = 16,
    length: options.Length = 512,
    output_dir: Annotated[
        Path,
        typer.Option("--output-dir", help="Where the recipe's own plan is, or is put; its variants' go to the cache."),
    ] = Path(),
    cache_dir: options.CacheDir = None,
    threads: options.Threads = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured on this machine before.")
    ] = False,
    as_json: options.Json = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with bars.", show_default=False)
    ] = None,
    invocation: typer.Context = None,  # type: ignore[assignment]  # typer's own; None where this is called as a function
) -> None:
    """Build the recipe's variants, measure each in turns with the recipe, and print what every factor gained.

    A factor is a pass of the recipe, an option of its target (KV format, 8-bit activations) or a feature of the runtime
    (in-flight batching, chunked prefill, prefix cache, speculation). Blocks are kept as they end: a run that was killed
    goes on where it stopped.
    """
    from rich.console import Console

    from optimc.build import BuildOptions, require_compiler
    from optimc.measure.attribution.config import AttributeConfig
    from optimc.measure.attribution.recipe_file import RecipeFile

    require_compiler("building a recipe's variants")
    faults = ignored_options(
        invocation,
        [
            (not knee, ("slo", "attain"), "needs --knee"),
            (windows == 0, ("length",), "is of --windows, and there are none"),
        ],
    )
    if faults:
        raise ConfigError("options", faults)
    with options.faults_by_option(concurrencies="--concurrency", budget_s="--budget-minutes"):
        config = AttributeConfig(
            mode=mode,  # type: ignore[arg-type]  # checked there
            pairs=pairs,
            concurrencies=options.numbers_option(concurrency, int, "--concurrency", "1,8"),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            requests=requests,
            budget_s=options.seconds_option(budget_minutes, "--budget-minutes"),
            knee=knee,
            slo=parse_slo(slo),
            attain=attain,
            speculation=speculation,
            windows=windows,
            length=length,
            threads=threads,
        )
    check_output(html, "--html")
    build_options = BuildOptions(overrides=tuple(overrides or ()), cache_dir=cache_dir, output_dir=output_dir)
    file = RecipeFile.read(recipe, build_options)
    with progress_bar() as progress:
        result = _run(recipe, file, config, build_options, fresh=fresh, progress=progress)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        Console().print(result.table())
    if html is not None:
        _write_page(html, result)


def _run(
    recipe: Path,
    file: RecipeFile,
    config: AttributeConfig,
    build_options: BuildOptions,
    *,
    fresh: bool,
    progress: Progress,
) -> Attribution:
    """Wire builds, engines, store and quality together."""
    from dataclasses import replace

    from optimc.build import build_recipe
    from optimc.measure.attribution.attribute import attribute as attribute_recipe
    from optimc.measure.attribution.surroundings import Surroundings
    from optimc.measure.machine import read_machine
    from optimc.measure.store import MeasurementStore

    cache = build_options.cache

    def build(variant: Variant) -> Path:
        output = cache / VARIANTS / f"{variant.name}.plan" if variant.overrides else None
        changed = replace(build_options, output=output, overrides=(*build_options.overrides, *variant.overrides))
        return build_recipe(
            recipe, changed, progress=lambda done, total, label: progress(done, total, f"{variant.name}: {label}")
        ).path

    store, machine = MeasurementStore(cache / "measurements"), read_machine()
    with plan_quality(
        cache,
        store,
        machine,
        windows=config.windows,
        length=config.length,
        threads=config.threads,
        fresh=fresh,
        progress=progress,
    ) as quality:
        around = Surroundings(
            build=build,
            open_engine=open_switched,
            store=store,
            quality=quality if config.windows else None,
            ladder=climb if config.knee else None,
            machine=machine,
            progress=progress,
        )
        return attribute_recipe(file, config, around, fresh=fresh)


def _write_page(path: Path, result: Attribution) -> None:
    from optimc.measure.machine import read_machine
    from optimc.measure.report import Report, html_report

    page = html_report(Report(title=result.recipe, machine=read_machine(), attribution=result))
    write_output("the page", path, page)
