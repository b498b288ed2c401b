"""`optimc export`: a recipe's quantized weights as a checkpoint folder for other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from optimc.cli import options
from optimc.cli.format import format_bytes
from optimc.cli.progress import progress_bar


def export(
    recipe: Annotated[Path, typer.Argument(help="Recipe in YAML.", show_default=False)],
    format_name: Annotated[
        str, typer.Option("--format", help="gptq, awq or compressed-tensors.", show_default=False, metavar="FORMAT")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write; must not exist yet.", show_default=False)
    ],
    overrides: options.Set = None,
    fresh: options.Fresh = False,
    max_host_bytes: options.MaxHostBytes = None,
    cache_dir: options.CacheDir = None,
    as_json: options.Json = False,
) -> None:
    """Write a recipe's weights in a checkpoint format of other tools. Weight passes run, graph passes do not."""
    from rich.console import Console

    from optimc.build import BuildOptions, export_recipe
    from optimc.cli.pass_summary import print_passes

    build_options = BuildOptions(
        overrides=tuple(overrides or ()),
        cache_dir=cache_dir,
        fresh=fresh,
        max_host_bytes=options.bytes_option(max_host_bytes, "--max-host-bytes"),
    )
    with progress_bar() as progress:
        result = export_recipe(recipe, format_name, output, build_options, progress=progress)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
        return
    console = Console()
    print_passes(console, f"{recipe.stem} → {result.folder}", result.reports)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    console.print(
        f"{result.num_layers} layers as {result.format}, {format_bytes(result.linear_bytes)} of "
        f"{format_bytes(result.size_bytes)}, in {result.seconds:.1f} s"
    )
