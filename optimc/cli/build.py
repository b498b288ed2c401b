"""`optimc build`: a recipe becomes an engine.plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from optimc.cli import options
from optimc.cli.format import format_bytes
from optimc.cli.progress import progress_bar


def build(
    recipe: Annotated[Path, typer.Argument(help="Recipe in YAML.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Plan to write; RECIPE-NAME.plan in this folder by default.")
    ] = None,
    overrides: options.Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no weights, show the passes, build nothing.")
    ] = False,
    dump_graph: Annotated[
        Path | None,
        typer.Option("--dump-graph", help="Leave the graph after each phase in this folder, as text and as ONNX."),
    ] = None,
    fresh: options.Fresh = False,
    max_host_bytes: options.MaxHostBytes = None,
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
) -> None:
    """Build the engine a recipe describes. What earlier builds did already is taken from the cache."""
    from rich.console import Console

    from optimc.build import BuildOptions, build_recipe, plan_build
    from optimc.cli.pass_summary import print_passes

    build_options = BuildOptions(
        output=output,
        overrides=tuple(overrides or ()),
        cache_dir=cache_dir,
        fresh=fresh,
        dump_graph=dump_graph,
        max_host_bytes=options.bytes_option(max_host_bytes, "--max-host-bytes"),
    )
    console = Console()
    if dry_run:
        outline = plan_build(recipe, build_options)
        if as_json:
            typer.echo(json.dumps(outline.to_json(), indent=2))
            return
        console.print(f"{outline.recipe.name}: {outline.architecture}, target {outline.recipe.target.backend}")
        console.print(f"  model   {outline.model}")
        console.print(f"  output  {outline.output}")
        for number, pass_name in enumerate(outline.passes, 1):
            console.print(f"  pass {number}  {pass_name}")
        console.print("Nothing was built.")
        return
    with progress_bar() as progress:
        result = build_recipe(recipe, build_options, progress=progress)
    if dump_graph is not None:
        _dump_program(result.path, dump_graph)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
        return
    if result.up_to_date:
        console.print(f"{result.path} is up to date ({format_bytes(result.size_bytes)}); --fresh rebuilds it")
        return
    print_passes(console, f"{result.manifest.name} → {result.path}", result.manifest.passes)
    console.print(
        f"{format_bytes(result.size_bytes)} in {result.seconds:.1f} s; `optimc serve {result.path}` serves it"
    )


def _dump_program(plan_path: Path, folder: Path) -> None:
    """Write what the graph became beside its other phases; only cpu plans have a program that can be read."""
    from optimc.cli.program_listing import list_program, read_program
    from optimc.plan import Plan
    from optimc.storage import storing

    with Plan.open(plan_path) as plan:
        if plan.manifest.target.backend == "cpu":
            lines = list_program(read_program(plan), lambda tensor: plan.spec(tensor).nbytes)
            with storing("the graph", folder):
                (folder / "program.txt").write_text("\n".join([*lines, ""]), "utf-8")
