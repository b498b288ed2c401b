"""What is known of builds before they begin: where they write, what they share, how much memory they will take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from optimc.errors import PlanError
from optimc.measure.compare.build_jobs import BuildJob, estimated_need
from optimc.plan import Plan

if TYPE_CHECKING:
    from optimc.build import BuildOptions
    from optimc.build.inputs import BuildInputs


def recipe_jobs(recipes: Sequence[Path], options: BuildOptions) -> list[BuildJob]:
    """Return one job per recipe, in order. Raises what reading a recipe raises."""
    from optimc.build import read_inputs

    jobs = []
    for recipe in recipes:
        inputs = read_inputs(recipe, options)
        need = estimated_need(_earlier_peaks(inputs), _checkpoint_bytes(Path(inputs.model)))
        jobs.append(BuildJob(inputs.recipe.name, recipe, inputs.output, need, _shared_work(inputs)))
    return jobs


def _earlier_peaks(inputs: BuildInputs) -> list[int]:
    """Return what each pass of an earlier build of this recipe took. One found in the cache took next to nothing."""
    if not inputs.output.is_file():
        return []
    try:
        with Plan.open(inputs.output) as plan:
            manifest = plan.manifest
    except PlanError:
        return []
    if manifest.source.recipe_hash != inputs.recipe.digest:
        return []
    return [report.peak_bytes for report in manifest.passes if not report.cached]


def _checkpoint_bytes(model: Path) -> int:
    """Return the size of a model's files, 0 for one that is still to be fetched."""
    if model.is_file():
        return model.stat().st_size
    weights = (".safetensors", ".gguf", ".bin")
    return sum(file.stat().st_size for file in model.glob("*") if file.suffix in weights) if model.is_dir() else 0


def _shared_work(inputs: BuildInputs) -> str:
    """Return equal text for recipes whose builds begin with the same work: model and first pass."""
    first = [spec.model_dump(mode="json") for spec in inputs.recipe.passes[:1]]
    return json.dumps([inputs.model, inputs.recipe.model.revision, first], sort_keys=True, default=str)
