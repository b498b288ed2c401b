"""Exporting: recipe in, a checkpoint folder for other tools out. The weight passes run, the graph is never made."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.build.calibration import load_calibration
from optimc.build.inputs import BuildInputs, BuildOptions, read_inputs
from optimc.build.load_model import cache_folder, load_model
from optimc.build.outline import check_model
from optimc.build.quality_windows import quality_windows
from optimc.errors import ConfigError, Fault, UnknownNameError
from optimc.plan import PassReport
from optimc.progress import Progress, no_progress

if TYPE_CHECKING:
    from optimc_passes.artifact import Artifact
    from optimc_passes.base import Pass
    from optimc_passes.checkpoint import Checkpoint
    from optimc_passes.formats.limits import FormatName, LayerFacts
    from optimc_passes.formats.write import Written

_KV_PASS = "kv_quant"


@dataclass(frozen=True)
class ExportResult:
    """A checkpoint folder on disk."""

    folder: Path
    format: str
    num_layers: int
    """Linear layers that are quantized."""
    linear_bytes: int
    """What they take."""
    size_bytes: int
    """All tensors."""
    seconds: float
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "folder": str(self.folder),
            "format": self.format,
            "num_layers": self.num_layers,
            "linear_bytes": self.linear_bytes,
            "size_bytes": self.size_bytes,
            "seconds": self.seconds,
            "passes": [report.model_dump(mode="json") for report in self.reports],
            "notes": list(self.notes),
        }


def export_recipe(
    recipe_path: Path,
    format_name: str,
    output: Path,
    options: BuildOptions | None = None,
    *,
    progress: Progress = no_progress,
) -> ExportResult:
    """Run a recipe's weight passes and write their result as a checkpoint of `format_name` into the folder `output`.

    What the format cannot hold is refused before a pass runs, wherever shapes and options alone tell. `output` must not
    exist or be an empty folder; it appears when everything in it has been read back.

    Raises UnknownNameError for the format and what `build_recipe` raises.
    """
    from optimc_passes.formats.limits import FORMATS

    start = time.perf_counter()
    options = options or BuildOptions()
    format_ = next((name for name in FORMATS if name == format_name), None)
    if format_ is None:
        raise UnknownNameError("format", format_name, FORMATS)
    _check_output(output)
    # The file that comes last stands for the folder in the checks of where a build writes.
    inputs = read_inputs(recipe_path, replace(options, output=output / "config.json"))

    def check_config(config: Any) -> None:
        check_model(inputs, config)

    checkpoint = load_model(inputs, options, check_config)
    passes = [pass_ for pass_ in inputs.passes if pass_.stage == "weights" and pass_.name != _KV_PASS]
    _refuse_early(passes, checkpoint, format_)
    with cache_folder(options) as cache:
        reports, written = _run_and_write(inputs, passes, checkpoint, format_, output, options, cache, progress)
    notes = (*_left_out(inputs), *written.notes)
    return ExportResult(
        written.folder,
        format_,
        written.num_layers,
        written.linear_bytes,
        written.size_bytes,
        time.perf_counter() - start,
        reports,
        notes,
    )


def _check_output(output: Path) -> None:
    from optimc_passes.formats.whole_folder import why_not_replaceable

    try:
        reason = why_not_replaceable(output)
    except OSError as error:
        reason = f"{output}: {error.strerror or error}"
    if reason is not None:
        raise ConfigError("options", [Fault("--output", reason)])


def _refuse_early(passes: list[Pass[Any]], checkpoint: Checkpoint, format_name: FormatName) -> None:
    """Ask the format about every layer that a pass will quantize, from shapes and options alone."""
    from optimc_passes.artifact import Artifact
    from optimc_passes.formats.write import nothing_quantized, refuse
    from optimc_passes.quantize.config import LayerChoice
    from optimc_passes.weights import Quantized

    artifact = Artifact.start(checkpoint, None)
    layers: list[LayerFacts] = []
    quantizing = [pass_ for pass_ in passes if not _only_prepares(pass_.config)]
    if not quantizing and not any(isinstance(weight, Quantized) for weight in checkpoint.weights.values()):
        raise nothing_quantized()
    for pass_ in quantizing:
        if isinstance(pass_.config, LayerChoice):
            layers += _planned(pass_.config, artifact)
    refuse(format_name, layers)


def _only_prepares(config: Any) -> bool:
    """Whether a pass leaves rounding to another one."""
    from optimc_passes.quantize.auto_bits import AutoBitsConfig

    return isinstance(config, AutoBitsConfig) or getattr(config, "rounding", None) == "later"


def _planned(config: Any, artifact: Artifact) -> list[LayerFacts]:
    from optimc_passes.formats.limits import LayerFacts
    from optimc_passes.quantize.config import schemes_of
    from optimc_passes.quantize.linears import linear_weights
    from optimc_passes.quantize.rtn import RtnConfig
    from optimc_passes.quantize.selection import select

    if config.bits == "auto":
        linears = linear_weights(artifact.checkpoint.config)
        chosen = select(linears, only=config.only, ignore=config.ignore, group_size=-1, ragged="error").chosen
        return [LayerFacts(linear.layer, linear.shape, None, None, is_head=linear.is_head) for linear in chosen]
    selection, schemes = schemes_of(config, artifact, has_embedding=isinstance(config, RtnConfig))
    return [
        LayerFacts(
            linear.layer,
            linear.shape,
            schemes[linear.layer].bits,
            schemes[linear.layer].group,
            symmetric=schemes[linear.layer].symmetric,
            is_head=linear.is_head,
            is_embedding=linear.is_embedding,
        )
        for linear in selection.chosen
    ]


def _run_and_write(
    inputs: BuildInputs,
    passes: list[Pass[Any]],
    checkpoint: Checkpoint,
    format_name: FormatName,
    output: Path,
    options: BuildOptions,
    cache: Path,
    progress: Progress,
) -> tuple[tuple[PassReport, ...], Written]:
    from optimc_passes.artifact import Artifact
    from optimc_passes.cache import ArtifactCache
    from optimc_passes.formats.write import write_checkpoint
    from optimc_passes.pipeline import PipelineOptions
    from optimc_passes.weight_stage import run_weight_stage

    windows, unmeasured = quality_windows(inputs, checkpoint, check_model(inputs, checkpoint.config))
    artifact, reports = run_weight_stage(
        passes,
        Artifact.start(checkpoint, load_calibration(inputs, checkpoint)),
        PipelineOptions(
            cache=ArtifactCache(cache),
            verify="off",
            on_progress=lambda step, done, total, _label: progress(done, total, step),
            resumable=not options.fresh,
            max_host_bytes=options.max_host_bytes,
            quality_windows=windows,
            unmeasured=unmeasured,
        ),
    )
    target = inputs.recipe.target
    written = write_checkpoint(
        checkpoint,
        artifact.weights,
        format_name,
        output,
        per_token_activations=target.activation_scales == "row" and target.int8_activations is not False,
        progress=lambda done, total, _label: progress(done, total, "write checkpoint (MiB)"),
    )
    return reports, written


def _left_out(inputs: BuildInputs) -> list[str]:
    """Return what of the recipe other tools decide for themselves."""
    notes = []
    graph = [pass_.name for pass_ in inputs.passes if pass_.stage == "graph"]
    if graph:
        notes.append("graph passes were not run: a checkpoint holds weights, whoever loads it makes its own graph")
    heads = [pass_.name for pass_ in inputs.passes if pass_.stage == "heads"]
    if heads:
        notes.append(
            f"{heads[0]} was not run: heads are trained for what a target computes, and are of use to its plan"
        )
    if any(pass_.name == _KV_PASS for pass_ in inputs.passes):
        notes.append(f"{_KV_PASS} was not run: how K and V are stored is for whoever serves the checkpoint to say")
    return notes
