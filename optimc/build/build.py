"""Building: recipe in, plan out. The pipeline does the work; this file puts its ends together."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.build.calibration import load_calibration
from optimc.build.inputs import BuildInputs, BuildOptions, read_inputs
from optimc.build.kv_references import check_kv
from optimc.build.load_model import cache_folder, load_model
from optimc.build.lowering_options import lowering_options, require_target
from optimc.build.manifest import assemble_manifest, build_key, tokenizer_tensors, tool_versions
from optimc.build.outline import check_model
from optimc.build.quality_windows import quality_windows
from optimc.build.target_model import BuildModels
from optimc.errors import LoweringError, OptimcError, PlanError
from optimc.plan import Manifest, Plan, write_plan
from optimc.progress import Progress, no_progress
from optimc.wording import one_line

if TYPE_CHECKING:
    from optimc_passes.checkpoint import Checkpoint
    from optimc_passes.graph.exported import Exported

_MOST_QUOTED = 200
"""Characters of an error, which may print a whole graph."""


@dataclass(frozen=True)
class BuildResult:
    """A plan on disk."""

    path: Path
    manifest: Manifest
    size_bytes: int
    seconds: float
    up_to_date: bool
    """The plan was there already, built from the same recipe, checkpoint and tools."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "plan": str(self.path),
            "name": self.manifest.name,
            "size_bytes": self.size_bytes,
            "seconds": self.seconds,
            "up_to_date": self.up_to_date,
            "passes": [report.model_dump(mode="json") for report in self.manifest.passes],
        }


def build_recipe(
    recipe_path: Path, options: BuildOptions | None = None, *, progress: Progress = no_progress
) -> BuildResult:
    """Build the plan a recipe describes, or find it up to date.

    Raises ConfigError for the recipe, MissingExtraError for a package its target wants, CheckpointError and
    UnsupportedModelError for the model, CalibrationError for the text, PassError for a pass, LoweringError for the
    target. Nothing half-written is left behind.
    """
    options = options or BuildOptions()
    start = time.perf_counter()
    inputs = read_inputs(recipe_path, options)
    require_target(inputs.recipe)

    def check_config(config: Any) -> None:
        check_kv(inputs, config, check_model(inputs, config))

    checkpoint = load_model(inputs, options, check_config)
    files = [pass_.files_digest for pass_ in inputs.passes if pass_.files_digest is not None]
    key = build_key(inputs.recipe, inputs.passes, "+".join([checkpoint.digest, *files]))
    existing = None if options.fresh or options.dump_graph else _read_existing(inputs.output)
    if existing is not None and existing.manifest.source.build_key == key:
        seconds = time.perf_counter() - start
        return BuildResult(inputs.output, existing.manifest, existing.size_bytes, seconds, up_to_date=True)
    with cache_folder(options) as cache:
        manifest = _run_passes(inputs, checkpoint, key, options, cache, progress)
    return BuildResult(
        inputs.output, manifest, inputs.output.stat().st_size, time.perf_counter() - start, up_to_date=False
    )


def _read_existing(path: Path) -> Plan | None:
    """Return the plan at `path`, or None if there is none or it is not worth keeping."""
    if not path.exists():
        return None
    try:
        with Plan.open(path) as plan:
            return plan
    except PlanError:
        return None


def _run_passes(
    inputs: BuildInputs,
    checkpoint: Checkpoint,
    key: str,
    options: BuildOptions,
    cache: Path,
    progress: Progress,
) -> Manifest:
    from optimc_passes.artifact import Artifact, derive_key
    from optimc_passes.cache import ArtifactCache
    from optimc_passes.emit import TARGETS
    from optimc_passes.frontend import FRONTEND_VERSION, export_graph
    from optimc_passes.pipeline import GraphSource, PipelineOptions, run_pipeline

    recipe = inputs.recipe
    max_seq_len = check_model(inputs, checkpoint.config)
    calibration = load_calibration(inputs, checkpoint)
    windows, unmeasured = quality_windows(inputs, checkpoint, max_seq_len)
    config_json = json.loads(checkpoint.config.to_json_string(use_diff=False))
    exported_as = derive_key(FRONTEND_VERSION, config_json, max_seq_len, _exporter_versions())

    def export() -> Exported:
        untested = recipe.model.allow_untested
        return export_graph(checkpoint.config, max_seq_len=max_seq_len, allow_untested=untested)

    with _unverified_graphs(inputs):
        result = run_pipeline(
            inputs.passes,
            Artifact.start(checkpoint, calibration),
            GraphSource(exported_as, export),
            PipelineOptions(
                cache=ArtifactCache(cache),
                verify=recipe.verify,
                dump_graph=options.dump_graph,
                on_progress=lambda step, done, total, _label: progress(done, total, step),
                resumable=not options.fresh,
                max_host_bytes=options.max_host_bytes,
                quality_windows=windows,
                unmeasured=unmeasured,
                models=BuildModels(recipe, checkpoint, max_seq_len, cache),
            ),
        )
        target = TARGETS[recipe.target.backend]
        wanted = lowering_options(recipe.target, recipe.limits, max_seq_len=max_seq_len, cache=cache)
        lowered = target(result.artifact, wanted)
    manifest = assemble_manifest(recipe, checkpoint, calibration, lowered, result, key=key, max_seq_len=max_seq_len)
    tensors = [*lowered.tensors, *tokenizer_tensors(checkpoint.tokenizer)]
    written, total = 0, sum(tensor.nbytes for tensor in tensors) >> 20

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        progress(written >> 20, total, "write plan (MiB)")

    return write_plan(inputs.output, manifest, tensors, progress=count)


@contextmanager
def _unverified_graphs(inputs: BuildInputs) -> Iterator[None]:
    """Where nothing checked what a user's pass left, what breaks on it later is no bug of ours: say how to find it."""
    try:
        yield
    except OptimcError:
        raise
    except Exception as error:
        users = [pass_.name for pass_ in inputs.passes if pass_.source_digest is not None]
        if inputs.recipe.verify != "off" or not users:
            raise
        message = f"{type(error).__name__}: {one_line(error)[:_MOST_QUOTED]}"
        raise LoweringError(
            f"no plan can be made of the graph ({message}), and nothing checked what {', '.join(users)} left: "
            "set verify to shapes or numeric to see what is wrong"
        ) from error


def _exporter_versions() -> dict[str, str]:
    versions = tool_versions()
    return {name: versions[name] for name in ("torch", "transformers", "onnxscript")}
