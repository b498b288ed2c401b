"""Which plans are checked, and the reference of each: the same weights on the CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpu.parity import Limits

RECIPE = Path("recipes/smollm2-rtx-int4.yaml")
ON_CPU = "target={backend: onnxruntime}"


@dataclass(frozen=True)
class Subject:
    """A TensorRT plan and what it is held against."""

    name: str
    plan: Path
    reference: Path | None
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Variant:
    """A change of RECIPE, and the reference's."""

    name: str
    overrides: tuple[str, ...]
    reference: tuple[str, ...]
    limits: Limits = field(default_factory=Limits)


VARIANTS = (
    Variant("int4", (), (ON_CPU,)),
    Variant("fp16", ("passes=[fuse]",), ("passes=[fuse]", ON_CPU)),
    # Both round keys and values to the same codes, but for those on the edge between two: 6e-4 nats were seen, and
    # logits 2.7% of the peak apart.
    Variant(
        "int8-kv",
        ("target.kv_dtype=int8",),
        ("target={backend: cpu, kv_dtype: int8, int8_activations: false}",),
        Limits(kl=5e-3, top1=0.95, margin=0.06, same=0.08),
    ),
)


def build_subject(variant: Variant, folder: Path, flavor: str, recipe: Path = RECIPE) -> Subject:
    """Build the variant and its reference into `folder`, or find them there up to date."""
    plan = _build(recipe, folder / f"{variant.name}.{flavor}.plan", (*variant.overrides, f"target.flavor={flavor}"))
    reference = _build(recipe, folder / f"{variant.name}.reference.plan", variant.reference)
    return Subject(variant.name, plan, reference, variant.limits)


def given_subject(text: str) -> Subject:
    """Return the subject of `PLAN` or `PLAN=REFERENCE`."""
    plan, _, reference = text.partition("=")
    return Subject(Path(plan).stem, Path(plan), Path(reference) if reference else None)


def _build(recipe: Path, output: Path, overrides: tuple[str, ...]) -> Path:
    from optimc.build import BuildOptions, build_recipe  # plans built elsewhere are checked without the compiler

    print(f"building {output}", file=sys.stderr, flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    return build_recipe(recipe, BuildOptions(output=output, overrides=overrides)).path
