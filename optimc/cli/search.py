"""`optimc search`: the best served figure a recipe can reach within its quality gates."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from optimc.cli import options
from optimc.cli.ignored_options import ignored_options
from optimc.cli.output_file import check_output, write_output
from optimc.cli.progress import progress_bar
from optimc.cli.slo_option import parse_slo
from optimc.cli.switched_engines import climb, open_switched, plan_quality
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from optimc.build import BuildOptions
    from optimc.measure.attribution.recipe_file import RecipeFile
    from optimc.measure.search.search_result import SearchResult, Trial
    from optimc.measure.search.space import Space
    from optimc.measure.workload import Workload
    from optimc.progress import Progress

PLANS = "search/plans"
"""Folder in the cache that holds the plans of trials."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """What a search's figures depend on beside the point."""

    workload: Workload
    attain: float
    price_per_hour: float | None
    windows: int
    length: int
    threads: int | None
    digest: dict[str, Any]
    """The same as the user gave it: by this an earlier search is found again."""


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long a search goes on, and from where."""

    trials: int
    budget_s: float | None
    seed: int
    fresh: bool


def search(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe in YAML.", show_default=False)],
    space: Annotated[
        Path | None,
        typer.Option(
            "--space",
            metavar="SPACE.yaml",
            help="What to choose from, for example `choices: {passes.rtn.bits: [4, 8], serve.max_seqs: [16, 64]}`: "
            "paths as for --set, or serve.* for switches of the engine; and `objective`. Without it: bits and groups "
            "of rtn, gptq and awq, the KV format, the number of Medusa heads.",
            show_default=False,
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="tpot_p50_ms|ttft_p50_ms|tokens_per_s|knee|cost",
            help="What is made best; tpot_p50_ms unless the space says so.",
            show_default=False,
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", help="Points to try, earlier runs' included.", min=1)] = 20,
    budget_minutes: Annotated[
        float | None,
        typer.Option("--budget-minutes", help="No trial begins after this time.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the sampler: which points are proposed.", min=0)] = 0,
    write_recipe: Annotated[
        Path | None,
        typer.Option("--write-recipe", metavar="FILE", help="Write the best point as a recipe.", show_default=False),
    ] = None,
    overrides: options.Set = None,
    concurrency: options.Clients = None,
    prompt_tokens: options.PromptTokens = 512,
    output_tokens: options.OutputTokens = 128,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests measured in a trial; max(8, 4 × clients).", show_default=False),
    ] = None,
    slo: options.Slo = None,
    attain: options.Attain = 0.95,
    machine_price: Annotated[
        float | None,
        typer.Option("--machine-price", help="Of an hour, for objective cost.", show_default=False),
    ] = None,
    windows: options.Windows = 16,
    length: options.Length = 512,
    cache_dir: options.CacheDir = None,
    threads: options.Threads = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget earlier trials of this search, and measure everything again.")
    ] = False,
    as_json: options.Json = False,
    invocation: typer.Context = None,  # type: ignore[assignment]  # typer's own; None where this is called as a function
) -> None:
    """Try the points of a search space: build, hold the plan against the recipe's quality gates, then measure it.

    A point that misses a gate gets no load. A killed search goes on; equal points are never measured twice. Exits with
    code 1 if no point keeps the gates.
    """
    from rich.console import Console

    from optimc.build import BuildOptions, require_compiler
    from optimc.measure.attribution.recipe_file import RecipeFile
    from optimc.measure.search.space import Space
    from optimc.measure.workload import Workload

    require_compiler("searching recipes")
    check_output(write_recipe, "--write-recipe")
    build_options = BuildOptions(overrides=tuple(overrides or ()), cache_dir=cache_dir)
    file = RecipeFile.read(recipe, build_options)
    chosen = Space.of_recipe(file.recipe) if space is None else Space.read(space)
    if objective is not None:
        chosen = _with_objective(chosen, objective)
    _check_needs(chosen, slo, machine_price)
    budget_s = options.seconds_option(budget_minutes, "--budget-minutes")
    is_knee = chosen.objective == "knee"
    faults = ignored_options(
        invocation,
        [
            (not is_knee, ("slo", "attain"), "is for objective knee"),
            (chosen.objective != "cost", ("machine_price",), "is for objective cost"),
        ],
    )
    faults += _length_faults(file, chosen, prompt_tokens + output_tokens, length)
    if faults:
        raise ConfigError("options", faults)
    _check_paths(file, chosen)
    load: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "concurrency": 1 if concurrency is None else concurrency,
        "requests": requests,
    }
    with options.faults_by_option():
        workload = Workload(**load, slo=parse_slo(slo))
    digest = {
        "load": load,
        "slo": slo,
        "attain": attain,
        "price": machine_price,
        "windows": windows,
        "length": length,
        "threads": threads,
    }
    measured = _Measured(workload, attain, machine_price, windows, length, threads, digest)
    effort = _Effort(trials, budget_s, seed, fresh)
    with progress_bar() as progress:
        result = _run(recipe, file, chosen, build_options, measured, effort, progress)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        Console().print(result.table())
    if write_recipe is not None and result.best is not None:
        _write_recipe(write_recipe, recipe, build_options, result.best)
    if result.best is None:
        raise typer.Exit(1)


def _with_objective(space: Space, objective: str) -> Space:
    from optimc.measure.search.space import Objective

    if objective not in get_args(Objective):
        known = ", ".join(get_args(Objective))
        raise ConfigError("options", [Fault("--objective", f"must be one of {known}, got '{objective}'")])
    return replace(space, objective=objective)  # type: ignore[arg-type]  # one of them, as just checked


def _check_needs(space: Space, slo: Sequence[str] | None, machine_price: float | None) -> None:
    """Raise ConfigError for an objective without what it is counted by."""
    faults = []
    if space.objective == "knee" and not slo:
        faults.append(Fault("--slo", "is needed for objective knee, for example ttft=500,tpot=40"))
    if space.objective == "cost" and not (machine_price is not None and 0 < machine_price < math.inf):
        got = "" if machine_price is None else f", got {machine_price:g}"
        faults.append(Fault("--machine-price", f"is needed for objective cost, a price per hour above 0{got}"))
    if faults:
        raise ConfigError("options", faults)


def _length_faults(file: RecipeFile, space: Space, load_tokens: int, length: int) -> list[Fault]:
    """Return what is longer than any plan of the recipe takes: every point would be built, and then fail."""
    if "limits.max_seq_len" in space.choices:
        return []
    most = file.recipe.limits.max_seq_len
    faults = []
    if most is not None and length > most:
        faults.append(Fault("--length", f"{length} tokens per window, the recipe's limits.max_seq_len is {most}"))
    if most is not None and load_tokens > most:
        text = f"{load_tokens} tokens with their answer, the recipe's limits.max_seq_len is {most}"
        faults.append(Fault("--prompt-tokens", text))
    return faults


def _check_paths(file: RecipeFile, space: Space) -> None:
    """Raise ConfigError, before any build, for choices that no value of makes a recipe of: a path misspelt."""
    from optimc.measure.search.space import SERVE, overrides_of

    faults = []
    for path, values in space.choices.items():
        if path.startswith(SERVE):
            continue
        refusals = [file.refusal(overrides_of({path: value})) for value in values]
        if None not in refusals:
            faults.append(Fault(f"choices.{path}", f"no value makes a recipe: {refusals[0]}"))
    if faults:
        raise ConfigError("search space", faults)


def _run(
    recipe: Path,
    file: RecipeFile,
    space: Space,
    build_options: BuildOptions,
    measured: _Measured,
    effort: _Effort,
    progress: Progress,
) -> SearchResult:
    """Wire sampler, builds, engines, store and quality together."""
    from optimc.build import build_recipe
    from optimc.measure.machine import read_machine
    from optimc.measure.search.search_result import SearchResult
    from optimc.measure.search.study import OptunaSampler, journal_path, search
    from optimc.measure.search.trial import TrialRunner
    from optimc.measure.store import EngineSwitches, MeasurementStore

    cache = build_options.cache
    store, machine = MeasurementStore(cache / "measurements"), read_machine()

    def build(changes: Sequence[str]) -> Path:
        digest = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:12]
        name = f"{file.recipe.name[:80]}--{digest}"
        changed = replace(
            build_options,
            output=cache / PLANS / f"{name}.plan",
            overrides=(*build_options.overrides, *changes, f"name={name}"),
        )
        return build_recipe(
            recipe, changed, progress=lambda done, total, label: progress(done, total, f"{name}: {label}")
        ).path

    sampler = OptunaSampler(
        space,
        journal_path(cache, space, file.recipe.digest, {**measured.digest, "machine": machine.id}),
        seed=effort.seed,
        fresh=effort.fresh,
    )
    with plan_quality(
        cache,
        store,
        machine,
        windows=measured.windows,
        length=measured.length,
        threads=measured.threads,
        fresh=effort.fresh,
        progress=progress,
    ) as quality:
        runner = TrialRunner(
            space=space,
            workload=measured.workload,
            check=file.check,
            build=build,
            open_engine=open_switched,
            quality=quality,
            store=store,
            machine=machine,
            ladder=climb,
            attain=measured.attain,
            price_per_hour=measured.price_per_hour,
            switches=EngineSwitches(threads=measured.threads),
            fresh=effort.fresh,
            progress=progress,
        )
        found = search(space, sampler, runner, trials=effort.trials, budget_s=effort.budget_s, progress=progress)
    return SearchResult(file.recipe.name, space, found, machine.to_json(), _method(file, measured))


def _method(file: RecipeFile, measured: _Measured) -> tuple[str, ...]:
    """Return how it was measured, in sentences."""
    method = [f"load: {measured.workload.shape()}; quality over {measured.windows} × {measured.length} tokens"]
    gates = {name: limit for name, limit in file.recipe.quality.model_dump().items() if limit is not None}
    if gates:
        method.append("gates: " + ", ".join(f"{name} {limit:g}" for name, limit in gates.items()))
    else:
        method.append("the recipe has no quality gate: the fewest bits win, whatever they cost; give it quality.max_kl")
    method.append("each point was measured once: the best of many is flattered by chance; compare it again before use")
    return tuple(method)


def _write_recipe(path: Path, recipe: Path, build_options: BuildOptions, best: Trial) -> None:
    """Write the recipe with the point put in; switches of the engine stand in a comment, since a recipe has none."""
    import yaml

    from optimc.measure.search.space import SERVE, overrides_of
    from optimc.recipe.overrides import apply_overrides
    from optimc.recipe.yaml_lines import parse_yaml

    data, _ = apply_overrides(
        parse_yaml(recipe.read_text("utf-8"), str(recipe)).data,
        (*build_options.overrides, *overrides_of(best.parameters), f"name={path.stem}"),
    )
    kl = "not measured" if best.kl is None else f"{best.kl:.3g}"
    lines = [f"# Found by `optimc search {recipe}`: {best.objective:.4g}, KL {kl}."]
    switches = {name: value for name, value in best.parameters.items() if name.startswith(SERVE)}
    if switches:
        lines.append("# Serve it with " + ", ".join(f"{name.removeprefix(SERVE)} {v}" for name, v in switches.items()))
    write_output("the recipe", path, "\n".join([*lines, yaml.safe_dump(data, sort_keys=False)]))
