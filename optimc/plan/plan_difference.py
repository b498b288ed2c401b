"""What sets two plans apart: settings, passes, what rewrites of the graph did, weights, tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from optimc.plan.manifest import Manifest
from optimc.plan.pass_report import PassReport
from optimc.plan.reader import Plan

_SETTINGS = ("target", "model", "limits", "kv", "tokens", "generation_defaults")
_HEADS = ("num_heads", "num_blocks", "conditioned", "projection", "draft_vocab_size", "bits", "base_hash")
"""Not what was measured of them, nor the tree that came of it."""
_SOURCES = ("model", "model_hash", "calibration_hash", "tools")
_COUNTS = ("exported_nodes", "cleaned_nodes", "attached_nodes", "fused_nodes")


class Change(BaseModel):
    """One value in the first and in the second plan; None where a plan has no such thing."""

    model_config = ConfigDict(frozen=True)
    left: Any
    right: Any


Changes = dict[str, Change]
"""By dotted name."""


class PlanDifference(BaseModel):
    """Everything that differs; all empty for plans of the same making. Seconds and file sizes are no difference."""

    model_config = ConfigDict(frozen=True)
    settings: Changes
    """Target, geometry, limits, cache layout, tokens, sampling defaults, Medusa heads, sources."""
    passes: Changes
    """Pass to its options and version; the second run of a pass in one plan is "rtn (2)"."""
    fusions: Changes
    """Pass and figure: sites matched and declined, operators left, activation bytes for a token; node counts."""
    quantization: Changes
    """Weight and property."""
    tensors: Changes
    """Tensor to its dtype, shape, bytes and SHA-256."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return not any((self.settings, self.passes, self.fusions, self.quantization, self.tensors))


def plan_difference(left: Plan, right: Plan) -> PlanDifference:
    """Compare two plans by their manifests and tensor tables; no tensor is read."""
    manifests = left.manifest, right.manifest
    return PlanDifference(
        settings=_changes(*(_settings(manifest) for manifest in manifests)),
        passes=_changes(*(_passes(manifest) for manifest in manifests)),
        fusions=_changes(*(_fusions(manifest) for manifest in manifests)),
        quantization=_changes(*(_flat(manifest.quantization) for manifest in manifests)),
        tensors=_changes(*(_tensors(plan) for plan in (left, right))),
    )


def _changes(left: Mapping[str, Any], right: Mapping[str, Any]) -> Changes:
    names = dict.fromkeys([*left, *right])
    return {
        name: Change(left=left.get(name), right=right.get(name)) for name in names if left.get(name) != right.get(name)
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    data = manifest.model_dump(mode="json")
    sources = {name: data["source"][name] for name in _SOURCES}
    # By layer: one line for each that differs, not the whole list twice.
    data["kv"]["layers"] = {str(index): layer for index, layer in enumerate(data["kv"]["layers"])}
    heads = {} if data["medusa"] is None else {name: data["medusa"][name] for name in _HEADS}
    return dict(_walk({**{name: data[name] for name in _SETTINGS}, "heads": heads, "source": sources}))


def _passes(manifest: Manifest) -> dict[str, Any]:
    return {label: {"version": report.version, **report.config} for label, report in _labelled(manifest.passes)}


def _fusions(manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if manifest.graph is not None:
        found |= {name: getattr(manifest.graph, name) for name in _COUNTS}
    for label, report in _labelled(manifest.passes):
        fusion = report.fusion
        if fusion is None:
            continue
        found[f"{label}.matched"] = fusion.matched
        found |= {f"{label}.declined.{declined.reason}": declined.sites for declined in fusion.declined}
        found |= {f"{label}.operators.{op}": count for op, count in fusion.ops_after.items()}
        found[f"{label}.activation_bytes"] = fusion.traffic_after_bytes
    return found


def _tensors(plan: Plan) -> dict[str, Any]:
    return {
        spec.name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.nbytes,
            "sha256": plan.manifest.tensors[spec.name].sha256,
        }
        for spec in plan
    }


def _labelled(reports: Iterable[PassReport]) -> Iterator[tuple[str, PassReport]]:
    seen: Counter[str] = Counter()
    for report in reports:
        seen[report.name] += 1
        yield report.name if seen[report.name] == 1 else f"{report.name} ({seen[report.name]})", report


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_walk(data))


def _walk(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
