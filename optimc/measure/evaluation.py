"""`optimc eval`: what the build cost in quality, measured on the engine as it serves.

The windows are fed teacher-forced through the engine's scheduler and executor, so chunking, the paged cache and the
quantized weights are all inside the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from optimc.errors import CheckpointError, MeasureError
from optimc.measure.divergence import WindowScore, score_window
from optimc.measure.reference import Reference, TransformersReference
from optimc.measure.served_engine import ServedEngine
from optimc.plan import Manifest, Plan, Quality
from optimc.plan.tensor_names import TOKENIZER
from optimc.progress import Progress, no_progress


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Means over `tokens` predictions. Without a reference everything but the perplexity is None."""

    perplexity: float
    reference_perplexity: float | None
    kl_mean: float | None
    """KL(original || plan), nats per token."""
    top1_agreement: float | None
    """Share of predictions where both have the same likeliest token."""
    tokens: int
    """Predicted tokens: windows * (length - 1)."""
    note: str | None = None
    """Why there is no reference."""
    kl_windows: tuple[float, ...] = ()
    """KL of each window alone, nats per token, in the windows' order: what plans are paired by. Empty without one."""

    def to_json(self) -> dict[str, float | int | str | list[float] | None]:
        """Return the figures by name, and why some are null."""
        return {
            "perplexity": self.perplexity,
            "reference_perplexity": self.reference_perplexity,
            "kl_mean": self.kl_mean,
            "top1_agreement": self.top1_agreement,
            "tokens": self.tokens,
            "kl_windows": list(self.kl_windows),
            **({"note": self.note} if self.note is not None else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EvalResult:
        """Inverse of `to_json`. Raises KeyError or TypeError on anything else."""
        return cls(**{**data, "kl_windows": tuple(data["kl_windows"])})

    def to_quality(self) -> Quality | None:
        """Return the figures as a plan records them; None without a reference."""
        if self.reference_perplexity is None or self.kl_mean is None or self.top1_agreement is None:
            return None
        return Quality(
            perplexity=self.perplexity,
            reference_perplexity=self.reference_perplexity,
            kl_mean=self.kl_mean,
            top1_agreement=self.top1_agreement,
            tokens=self.tokens,
        )

    def table(self) -> Table:
        """Return the report for a terminal."""
        table = Table("", "value", "meaning", caption=self.note, caption_justify="left")
        table.add_row("perplexity", f"{self.perplexity:.4f}", f"of the plan, over {self.tokens} predicted tokens")
        rows = [
            ("perplexity, original", self.reference_perplexity, ".4f", "transformers in float32, same tokens"),
            ("KL mean", self.kl_mean, ".3g", "KL(original || plan), nats per token"),
            ("top-1 agreement", self.top1_agreement, ".4%", "same likeliest token"),
        ]
        for name, value, spec, meaning in rows:
            table.add_row(name, "n/a" if value is None else format(value, spec), meaning)
        return table


def evaluate(
    engine: ServedEngine,
    windows: NDArray[np.int32],
    reference: Reference | None,
    progress: Progress = no_progress,
    *,
    note: str | None = None,
) -> EvalResult:
    """Score the engine on windows [W, T], one at a time; memory holds one window's logits of each side.

    Raises MeasureError if the windows are too long for the plan, or the logits are not finite or of another vocabulary.
    """
    count, length = windows.shape
    if length > engine.max_seq_len:
        raise MeasureError(f"windows of {length} tokens exceed the plan's max_seq_len {engine.max_seq_len}")
    total = WindowScore()
    kl_windows: list[float] = []
    progress(0, count, "eval")
    for number, window in enumerate(windows):
        expected = None if reference is None else reference.logits(window)
        try:
            score = score_window(window, engine.score(window.tolist()), expected)
        except ValueError as error:
            raise MeasureError(f"{engine.manifest.name}, window {number}: {error}") from error
        total += score
        kl_windows.append(score.kl / score.predictions)
        progress(number + 1, count, "eval")
    if reference is None:
        return EvalResult(total.perplexity, None, None, None, total.predictions, note)
    return EvalResult(
        perplexity=total.perplexity,
        reference_perplexity=total.reference_perplexity,
        kl_mean=total.kl / total.predictions,
        top1_agreement=total.top1_matches / total.predictions,
        tokens=total.predictions,
        kl_windows=tuple(kl_windows),
    )


def eval_plan(
    engine: ServedEngine,
    plan: Plan,
    *,
    cache_dir: Path,
    against: str | None = None,
    windows: int = 16,
    length: int = 512,
    trust_remote_code: bool = False,
    progress: Progress = no_progress,
) -> EvalResult:
    """Evaluate a started engine of `plan` on the default data against a model, by default the one it was built from.

    When that one is not there any more, only the perplexity is measured and the result says so; an `against` that
    cannot be loaded raises CheckpointError. Raises MeasureError if the original is not what the plan was built from.
    """
    tokens = plan_windows(plan, windows, length)
    try:
        reference = load_reference(
            engine.manifest, cache_dir=cache_dir, against=against, trust_remote_code=trust_remote_code
        )
    except CheckpointError as error:
        if against is not None:
            raise
        note = f"no comparison: the original model cannot be loaded ({error}); --against names another place"
        return evaluate(engine, tokens, None, progress, note=note)
    return evaluate(engine, tokens, reference, progress)


def plan_windows(plan: Plan, windows: int, length: int) -> NDArray[np.int32]:
    """Return the default evaluation data in the plan's own tokens, int32 [windows, length]."""
    from optimc_passes.calibrate import evaluation_windows

    if TOKENIZER not in plan:
        raise MeasureError(f"{plan.path}: the plan has no tokenizer, so there is no text to evaluate it on")
    return evaluation_windows(plan.blob(TOKENIZER), windows=windows, length=length)


def load_reference(
    manifest: Manifest, *, cache_dir: Path, against: str | None = None, trust_remote_code: bool = False
) -> TransformersReference:
    """Load the model a plan was built from, or `against`.

    A plan is data: it cannot ask for remote code, only the caller can. Raises CheckpointError if the model is missing
    or damaged, MeasureError if the original has changed since the build.
    """
    from optimc_passes.load import load_checkpoint

    revision = None if against is not None else _revision(manifest)
    checkpoint = load_checkpoint(
        against or manifest.source.model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        cache_dir=cache_dir,
    )
    if against is None and checkpoint.digest != manifest.source.model_hash:
        raise MeasureError(
            f"{manifest.source.model} has changed since the plan was built (SHA-256 {checkpoint.digest[:12]}, the plan "
            f"has {manifest.source.model_hash[:12]}); rebuild the plan, or name the model with --against"
        )
    return TransformersReference(checkpoint)


def _revision(manifest: Manifest) -> str | None:
    model = manifest.source.recipe.get("model")
    return model.get("revision") if isinstance(model, dict) else None
