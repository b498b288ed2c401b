"""What rewrites did to a plan's graph: `optimc inspect PLAN --fusions` and `--why RULE`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from optimc.cli.format import format_bytes
from optimc.errors import PlanError, UnknownNameError
from optimc.plan import FusionReport, Manifest, Plan


@dataclass(frozen=True)
class Rewrite:
    """One rewrite and what it did."""

    rule: str
    stage: Literal["export", "graph"]
    """The frontend's clean-up runs some of the rules that are graph passes too."""
    report: FusionReport


def rewrites_of(plan: Plan) -> list[Rewrite]:
    """Return every rewrite in order, the frontend's first.

    Raises PlanError for a plan that has no such record.
    """
    manifest = plan.manifest
    if manifest.graph is None:
        raise PlanError(f"{plan.path}: built before rewrites of the graph were recorded; build it again to see them")
    exported = [Rewrite(name, "export", report) for name, report in manifest.graph.frontend.items()]
    passes = [Rewrite(entry.name, "graph", entry.fusion) for entry in manifest.passes if entry.fusion is not None]
    return [*exported, *passes]


def fusions_json(plan: Plan) -> dict[str, Any]:
    """Return JSON values: the graph's way and the rewrites in order."""
    rules = [
        {"rule": rewrite.rule, "stage": rewrite.stage, **rewrite.report.model_dump(mode="json")}
        for rewrite in rewrites_of(plan)
    ]
    assert plan.manifest.graph is not None
    return {"graph": plan.manifest.graph.model_dump(mode="json", exclude={"frontend"}), "rules": rules}


def fusion_lines(plan: Plan) -> Iterator[str]:
    """Yield a line per rewrite under a heading, and below it what there is to say of it in words.

    Raises PlanError for a plan that has no such record.
    """
    rewrites = rewrites_of(plan)
    width = max(map(len, ["rule", *(rewrite.rule for rewrite in rewrites)]))
    yield f"{'rule':{width}}  at      matched  declined  saved a token    error"
    for rewrite in rewrites:
        report = rewrite.report
        declined = sum(entry.sites for entry in report.declined)
        error = "" if report.relative_error is None else f"{report.relative_error:.1e}"
        figures = f"{report.matched:7}  {declined:8}  {_saved(report):>13}  {error:>7}"
        yield f"{rewrite.rule:{width}}  {rewrite.stage:6}  {figures}".rstrip()
        yield from (f"    {line}" for line in _words(report))


def summarize(plan: Plan) -> Iterator[str]:
    """Yield lines on the whole graph: nodes from the exporter to the end, operators, activations, seconds."""
    graph = plan.manifest.graph
    assert graph is not None, "rewrites_of has refused such a plan"
    yield (
        f"nodes: {graph.exported_nodes:,} exported, {graph.cleaned_nodes:,} cleaned, {graph.attached_nodes:,} with "
        f"weights, {graph.fused_nodes:,} fused"
    )
    reports = _counted(plan.manifest)
    if reports:
        first, last = reports[0], reports[-1]
        names = dict.fromkeys([*last.ops_after, *first.ops_before])
        counts = (f"{name} {first.ops_before.get(name, 0)} → {last.ops_after.get(name, 0)}" for name in names)
        yield f"operators: {', '.join(counts)}"
        before, after = first.traffic_before_bytes, last.traffic_after_bytes
        yield f"activations moved for a token: {format_bytes(before)} → {format_bytes(after)}"
    yield f"seconds: {graph.export_seconds:.1f} for the export, {graph.graph_seconds:.1f} for the graph passes"


def explain(plan: Plan, rule: str) -> Iterator[str]:
    """Yield why a rule did not fire where it came closest, and what is around that node.

    Raises UnknownNameError listing the plan's rules, PlanError for a plan without a record.
    """
    rewrites = rewrites_of(plan)
    found = [rewrite for rewrite in rewrites if rewrite.rule == rule]
    if not found:
        raise UnknownNameError("rule", rule, {rewrite.rule for rewrite in rewrites})
    for rewrite in found:
        report = rewrite.report
        declined = sum(entry.sites for entry in report.declined)
        before = f", {report.already} done before" if report.already else ""
        yield f"{rule} ({rewrite.stage}): {report.matched} matched, {declined} declined{before}"
        for entry in report.declined:
            yield f"  declined at {entry.sites}, first at {entry.first}: {entry.reason}"
        nearest = report.nearest
        if nearest is None:
            yield "  no near miss" + ("" if report.matched else ": the pattern does not occur")
            continue
        found_nodes = f"{nearest.matched_nodes} {'node' if nearest.matched_nodes == 1 else 'nodes'} of the pattern"
        yield f"  nearest miss: {nearest.op} '{nearest.node}', {found_nodes} there: {nearest.reason}"
        yield from (f"    {line}" for line in nearest.surroundings)


def _counted(manifest: Manifest) -> list[FusionReport]:
    return [report.fusion for report in manifest.passes if report.fusion is not None and report.fusion.ops_before]


def _words(report: FusionReport) -> Iterator[str]:
    """Yield operators that became more or fewer, reasons, and of a rule that never fired what came closest."""
    changed = ", ".join(_changed_operators(report))
    if changed:
        yield changed
    if report.already:
        yield f"done before at {report.already}"
    for entry in report.declined:
        yield f"declined at {entry.sites}, first at {entry.first}: {entry.reason}"
    if report.nearest and not report.matched and not report.declined:
        yield f"nearest miss: {report.nearest.op} {report.nearest.node}: {report.nearest.reason}"


def _changed_operators(report: FusionReport) -> Iterator[str]:
    before, after = report.ops_before, report.ops_after
    for name in dict.fromkeys([*before, *after]):
        if before.get(name, 0) != after.get(name, 0):
            yield f"{name} {before.get(name, 0)} → {after.get(name, 0)}"


def _saved(report: FusionReport) -> str:
    saved = report.traffic_before_bytes - report.traffic_after_bytes
    return "" if saved == 0 else format_bytes(saved) if saved > 0 else f"-{format_bytes(-saved)}"
