"""`optimc inspect`: what a plan says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.format import format_bytes, format_metrics, format_options

if TYPE_CHECKING:
    from rich.table import Table

    from optimc.plan import Manifest, Plan
    from optimc.plan.cpu_program import CpuProgram


def inspect(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="An engine.plan.", show_default=False)],
    other_path: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER]", help="Another one: show what sets the two apart.", show_default=False),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check every tensor against its SHA-256.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    program: Annotated[
        bool,
        typer.Option(
            "--program",
            help="List a cpu plan's operations with buffers and weights, or a tensorrt plan's engines, and no more.",
        ),
    ] = False,
    fusions: Annotated[
        bool,
        typer.Option("--fusions", help="Show what each rewrite of the graph matched, declined and saved."),
    ] = False,
    why: Annotated[
        str | None,
        typer.Option("--why", metavar="RULE", help="Show where a rewrite came closest to firing, and why it did not."),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers", help="Show what each pass did layer by layer: errors, sizes, fallbacks, quality, frontier."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show target, limits, cache layout, quantization, passes and sources of a plan, or compare two plans."""
    from rich.console import Console
    from rich.table import Table

    from optimc.plan import Plan

    if other_path is not None:
        if tensors or program or fusions or layers or why is not None:
            asked = "--tensors, --program, --fusions, --layers, --why"
            raise typer.BadParameter(f"these show one plan; give one: {asked}", param_hint="")
        _print_difference(plan_path, other_path, verify, as_json)
        return
    with Plan.open(plan_path, verify=verify) as plan:
        manifest = plan.manifest
        if program:
            _print_program(plan, as_json)
            return
        if fusions or why is not None:
            _print_fusions(plan, why, as_json)
            return
        if layers:
            _print_layers(manifest, as_json)
            return
        if as_json:
            facts = manifest.model_dump(mode="json") | {
                "size_bytes": plan.size_bytes,
                "content_hash": plan.content_hash,
                "verified": verify,
            }
            typer.echo(json.dumps(facts, indent=2))
            return
        console = Console()
        console.print(_summary(manifest, plan.size_bytes))
        if verify:
            console.print(f"all {len(manifest.tensors)} tensors match their SHA-256")
        if manifest.passes:
            console.print(_passes(manifest))
        if manifest.medusa is not None:
            _print_heads(manifest)
        if tensors:
            table = Table("tensor", "dtype", "shape", "bytes")
            for spec in plan:
                table.add_row(spec.name, spec.dtype, str(list(spec.shape)), f"{spec.nbytes:,}")
            console.print(table)


def _print_difference(left_path: Path, right_path: Path, verify: bool, as_json: bool) -> None:
    from optimc.cli.difference_listing import list_difference
    from optimc.plan import Plan
    from optimc.plan.plan_difference import plan_difference

    with Plan.open(left_path, verify=verify) as left, Plan.open(right_path, verify=verify) as right:
        difference = plan_difference(left, right)
    if as_json:
        typer.echo(difference.model_dump_json(indent=2))
        return
    for line in list_difference(difference):
        typer.echo(line)


def _print_fusions(plan: Plan, rule: str | None, as_json: bool) -> None:
    from optimc.cli.fusion_listing import explain, fusion_lines, fusions_json, summarize

    if as_json:
        facts = fusions_json(plan)
        if rule is not None:
            lines = list(explain(plan, rule))  # refuses an unknown rule
            facts = {"rules": [entry for entry in facts["rules"] if entry["rule"] == rule], "explanation": lines}
        typer.echo(json.dumps(facts, indent=2))
        return
    if rule is not None:
        for line in explain(plan, rule):
            typer.echo(line)
        return
    for line in (*fusion_lines(plan), "", *summarize(plan)):
        typer.echo(line)


def _print_layers(manifest: Manifest, as_json: bool) -> None:
    from optimc.cli.pass_listing import pass_json, pass_lines

    if as_json:
        typer.echo(json.dumps([pass_json(report) for report in manifest.passes if report.layers], indent=2))
        return
    listed = [(report.name, list(pass_lines(report))) for report in manifest.passes]
    for number, (name, lines) in enumerate(pair for pair in listed if pair[1]):
        for line in (*([""] if number else []), name, *(f"  {line}" for line in lines)):
            typer.echo(line)
    if not any(lines for _, lines in listed):
        typer.echo("no pass of this plan says anything about single layers")


def _print_heads(manifest: Manifest) -> None:
    from optimc.cli.heads_listing import heads_lines

    assert manifest.medusa is not None
    report = next((report.heads for report in manifest.passes if report.heads is not None), None)
    typer.echo("heads")
    for line in heads_lines(manifest.medusa, report):
        typer.echo(f"  {line}")


def _print_program(plan: Plan, as_json: bool) -> None:
    from optimc.cli.program_listing import list_program, read_program
    from optimc.cli.tensorrt_listing import list_tensorrt
    from optimc.plan.tensorrt_program import TensorRtProgram
    from optimc_runtime.executor.tensorrt.checked_program import checked_program

    def size(tensor: str) -> int:
        return plan.spec(tensor).nbytes

    program: CpuProgram | TensorRtProgram
    if plan.manifest.target.backend == "tensorrt":
        program = checked_program(plan)
        lines = list_tensorrt(program, plan.manifest.kv, size)
    else:
        program = read_program(plan)
        lines = list_program(program, size)
    if as_json:
        typer.echo(program.model_dump_json(indent=2, exclude_none=True))
        return
    for line in lines:
        typer.echo(line)


def _summary(manifest: Manifest, size_bytes: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from optimc.cli.kv_listing import describe_kv

    limits, kv = manifest.limits, manifest.kv
    token_values = sum(layer.num_kv_heads * layer.head_dim for layer in kv.layers) * 2
    quantized: dict[str, int] = {}
    for scheme in manifest.quantization.values():
        grid = "symmetric" if scheme["symmetric"] else "asymmetric"
        key = f"{scheme['method']} {scheme['bits']}-bit {grid} group {scheme['group']}"
        quantized[key] = quantized.get(key, 0) + 1
    table = Table(show_header=False, title=manifest.name, title_justify="left")
    rows = {
        "model": f"{manifest.model.architecture}, {manifest.model.num_layers} layers, "
        f"hidden {manifest.model.hidden_size}, vocabulary {manifest.model.vocab_size}",
        "target": manifest.target.backend,
        "needs": ", ".join(f"{k} {v}" for k, v in manifest.target.requirements.items()) or "nothing else",
        "size": format_bytes(size_bytes),
        "limits": f"{limits.max_seq_len} tokens a sequence, {limits.max_step_tokens} tokens and "
        f"{limits.max_seqs} sequences a step",
        "kv cache": f"{describe_kv(kv)}; blocks of {kv.block_size} tokens, {token_values} values a token, "
        f"{format_bytes(limits.kv_memory_bytes)} by default",
        "weights": ", ".join(f"{count} × {key}" for key, count in quantized.items()) or "not quantized",
        "graph": _graph(manifest),
        "eos": ", ".join(str(token) for token in manifest.tokens.eos) or "none",
        "generation defaults": ", ".join(f"{k} {v}" for k, v in manifest.generation_defaults.items()) or "none",
        "source": f"{manifest.source.model} ({manifest.source.model_hash[:12]})",
        "built with": ", ".join(f"{name} {version}" for name, version in manifest.source.tools.items()),
    }
    if manifest.quality is not None:
        quality = manifest.quality
        rows["quality"] = (
            f"perplexity {quality.perplexity:.3f} (original {quality.reference_perplexity:.3f}), "
            f"KL {quality.kl_mean:.2e}, top-1 {quality.top1_agreement:.4f} over {quality.tokens} tokens"
        )
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _graph(manifest: Manifest) -> str:
    graph = manifest.graph
    if graph is None:
        return "not recorded"
    return f"{graph.exported_nodes:,} nodes exported, {graph.fused_nodes:,} left (--fusions shows how)"


def _passes(manifest: Manifest) -> Table:
    from rich.table import Table
    from rich.text import Text

    from optimc.cli.pass_listing import quality_line

    table = Table()
    for heading in ("pass", "options", "seconds", "figures", "decisions"):
        table.add_column(heading, overflow="fold")
    for report in manifest.passes:
        decisions = list(report.decisions[:6])
        if len(report.decisions) > 6:
            decisions.append(f"… {len(report.decisions) - 6} more (--json)")
        figures = format_metrics(report.metrics)
        if report.quality is not None:
            figures.append(quality_line(report.quality))
        cells = (
            report.name,
            format_options(report.config),
            f"{report.seconds:.1f}",
            *map("\n".join, (figures, decisions)),
        )
        table.add_row(*map(Text, cells))
    return table
