"""`optimc compare`: recipes and plans on one latency/quality table."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.ignored_options import ignored_options
from optimc.cli.load_options import parse_rates
from optimc.cli.output_file import output_fault, write_output
from optimc.cli.progress import progress_bar
from optimc.cli.slo_option import parse_slo
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from optimc.build import BuildOptions
    from optimc.measure.attribution.attribution import Attribution
    from optimc.measure.bench import BoundOf
    from optimc.measure.compare.comparison import Comparison
    from optimc.measure.compare.failure import Failure
    from optimc.measure.roofline.rates import MachineRates
    from optimc.measure.store import PlanSubject
    from optimc.progress import Progress


def compare(
    items: Annotated[
        list[Path], typer.Argument(metavar="RECIPE|PLAN...", help="Recipes are built if need be.", show_default=False)
    ],
    overrides: options.Set = None,
    output_dir: Annotated[Path, typer.Option("--output-dir", help="Where recipes' plans are, or are put.")] = Path(),
    prompt_tokens: options.PromptTokens = 512,
    output_tokens: options.OutputTokens = 128,
    concurrency: options.ClientCounts = "1,8",
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests measured at each concurrency; max(8, 4 × it).")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs of each benchmark; from 3 on with intervals between the runs.")
    ] = 1,
    slo: options.Slo = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Raise the arrival rate until --slo breaks, and tell the knee. Minutes.")
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option("--rates", help="The ladder's rates in requests/s, with commas; found by default."),
    ] = None,
    attain: options.Attain = 0.95,
    windows: options.Windows = 16,
    length: options.Length = 512,
    machine_price: Annotated[
        float | None,
        typer.Option("--machine-price", help="Price of this machine per hour: adds the cost per million tokens."),
    ] = None,
    currency: Annotated[str, typer.Option("--currency", help="What --machine-price is in.")] = "USD",
    build_jobs: Annotated[
        int | None,
        typer.Option("--build-jobs", help="Most builds at once, where memory allows; half the cores.", min=1),
    ] = None,
    max_host_bytes: Annotated[
        str | None,
        typer.Option("--max-host-bytes", help="Most memory all builds may take together, for example 8GiB."),
    ] = None,
    attribution: Annotated[
        Path | None,
        typer.Option("--attribution", metavar="FILE.json", help="From `optimc attribute --json`, for --html."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a report with charts, one file that works offline."),
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound/--no-bound", help="Say how far the machine would let each plan go (20 s, once).")
    ] = True,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what was measured on this machine before.")
    ] = False,
    cache_dir: options.CacheDir = None,
    threads: options.Threads = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    as_json: options.Json = False,
    invocation: typer.Context = None,  # type: ignore[assignment]  # typer's own; None where this is called as a function
) -> None:
    """Build what is missing, measure one plan at a time, print one row per plan and mark the Pareto front.

    Figures are kept by plan, machine and load: what was measured before is not measured again without --fresh.
    A plan that cannot be built or measured is told, and the others are compared. Exits with code 1 then, and if a plan
    fails a quality gate of its recipe.
    """
    from rich.console import Console

    from optimc.build import BuildOptions, require_compiler
    from optimc.cli.engine_options import load_engine
    from optimc.measure.compare.compare_plans import RECIPE_SUFFIXES
    from optimc.measure.compare.compare_plans import compare as compare_plans
    from optimc.measure.compare.config import CompareConfig
    from optimc.measure.compare.cost import Price

    require_compiler("comparing plans with the original model")
    has_recipe = any(item.suffix.lower() in RECIPE_SUFFIXES for item in items)
    faults = ignored_options(
        invocation,
        [
            (not ladder, ("attain", "rates"), "needs --ladder"),
            (machine_price is None, ("currency",), "needs --machine-price"),
            (
                not has_recipe,
                ("overrides", "output_dir", "build_jobs", "max_host_bytes"),
                "is for building recipes, and there are only plans",
            ),
        ],
    )
    if as_json and markdown:
        faults.append(Fault("--markdown", "and --json are two ways to print one result; give one"))
    if faults:
        raise ConfigError("options", faults)
    ladder_rates = parse_rates(rates)
    with options.faults_by_option(concurrencies="--concurrency"):
        config = CompareConfig(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            concurrencies=options.numbers_option(concurrency, int, "--concurrency", "1,8"),
            requests=requests,
            windows=windows,
            length=length,
            threads=threads,
            repeats=repeats,
            slo=parse_slo(slo),
            ladder=ladder,
            attain=attain,
            rates=None if ladder_rates is None else tuple(ladder_rates),
        )
    price = None if machine_price is None else Price(machine_price, currency)
    memory = options.bytes_option(max_host_bytes, "--max-host-bytes")
    attributed = None if attribution is None else read_attribution(attribution)
    _check_output(html, attribution)
    build_options = BuildOptions(overrides=tuple(overrides or ()), cache_dir=cache_dir, output_dir=output_dir)
    check_items(items, build_options)
    with progress_bar() as progress:
        known_rates = _rates(build_options.cache, threads) if bound else None
        result = compare_plans(
            items,
            config,
            build=lambda recipes: build_all(
                recipes, build_options, most=build_jobs, max_host_bytes=memory, progress=progress
            ),
            open_engine=lambda path: load_engine(path, threads=threads),
            cache_dir=build_options.cache,
            fresh=fresh,
            price=price,
            progress=progress,
            bound_for=bound_for(known_rates),
        )
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif markdown:
        typer.echo(result.markdown())
    else:
        Console().print(result.table())
    if html is not None:
        _write_html(html, result, attributed, known_rates)
        if not as_json and not markdown:
            Console().print(f"report: {html}", markup=False, highlight=False)
    if not result.ok:
        raise typer.Exit(1)


def build_all(
    recipes: Sequence[Path],
    options: BuildOptions,
    *,
    most: int | None,
    max_host_bytes: int | None,
    progress: Progress,
) -> Mapping[Path, Path | Failure]:
    """Build recipes, in processes of their own, and return their plans, or why there is none.

    Raises ConfigError for a recipe that cannot be read, and MeasureError where nobody knows how much memory is free.
    """
    from optimc.measure.compare.build_jobs import memory_for_builds, run_builds
    from optimc.measure.compare.child_build import ChildBuild
    from optimc.measure.compare.failure import Failure
    from optimc.measure.compare.recipe_jobs import recipe_jobs

    jobs = recipe_jobs(recipes, options)
    most = min(most or max(1, (os.cpu_count() or 1) // 2), len(jobs))
    arguments = [part for override in options.overrides for part in ("--set", override)]
    arguments += ["--cache-dir", str(options.cache)]
    if max_host_bytes is not None:
        arguments += ["--max-host-bytes", str(max_host_bytes // most)]
    failed = run_builds(
        jobs,
        most=most,
        memory_bytes=memory_for_builds(max_host_bytes, most),
        start=lambda job: ChildBuild(job, arguments),
        pause=lambda: time.sleep(0.1),
        progress=progress,
    )
    return {job.recipe: Failure(job.name, job.recipe, failed[job]) if job in failed else job.output for job in jobs}


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


def read_attribution(path: Path) -> Attribution:
    """Return what `optimc attribute --json` printed. Raises ConfigError."""
    from optimc.measure.attribution.attribution import Attribution

    try:
        return Attribution.from_json(json.loads(path.read_text("utf-8")))
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"is not what `optimc attribute --json` prints ({type(error).__name__}: {error})"
    raise ConfigError("options", [Fault("--attribution", f"{path}: {reason}")])


def _check_output(html: Path | None, attribution: Path | None) -> None:
    """Raise ConfigError for a report that could not be written after an hour, or would not be."""
    faults = []
    if html is None and attribution is not None:
        faults.append(Fault("--attribution", "is shown in the report only; give --html FILE"))
    unwritable = output_fault(html, "--html")
    if unwritable is not None:
        faults.append(unwritable)
    if faults:
        raise ConfigError("options", faults)


def _rates(cache: Path, threads: int | None) -> MachineRates | None:
    from optimc.measure.roofline.rates_store import try_rates

    return try_rates(cache, threads)


def bound_for(rates: MachineRates | None) -> Callable[[PlanSubject], BoundOf | None]:
    """Return what gives a plan's `BoundOf`: None without rates, and for targets whose work nobody can count."""

    def find(subject: PlanSubject) -> BoundOf | None:
        if rates is None:
            return None
        from optimc.errors import PlanTargetError
        from optimc.measure.roofline.row_bound import bound_of
        from optimc.plan import Plan

        with Plan.open(subject.path) as plan:
            try:
                return bound_of(plan, rates)
            except PlanTargetError:
                return None

    return find


def _write_html(path: Path, result: Comparison, attribution: Attribution | None, rates: MachineRates | None) -> None:
    from optimc.errors import PlanTargetError
    from optimc.measure.report import Report, html_report
    from optimc.measure.roofline.roofline import roofline
    from optimc.plan import Plan

    rooflines = {}
    config = result.config
    batches = sorted({1, 2, 4, 8, 16, 32, *config.concurrencies})
    context = config.prompt_tokens + config.output_tokens // 2
    if rates is not None:
        for row in result.rows:
            # A target whose work nobody can count has a row, and no roofline.
            with suppress(PlanTargetError), Plan.open(row.path) as plan:
                rooflines[row.name] = roofline(plan, rates, batches=batches, contexts=(context,))
    ladders = {row.name: row.measurement.ladder for row in result.rows if row.measurement.ladder is not None}
    command = shlex.join(["optimc", *sys.argv[1:]])
    report = Report(
        title=" · ".join(dict.fromkeys(row.name for row in result.rows[:3])) + (" · …" if len(result.rows) > 3 else ""),
        machine=result.machine,
        comparison=result,
        ladders=ladders,
        attribution=attribution,
        rooflines=rooflines,
        method=(f"Made by: {command}",),
    )
    write_output("the report", path, html_report(report))
