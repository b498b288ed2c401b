"""How passes are run; nothing here changes what they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.progress import Progress
from optimc_passes.base import Pass
from optimc_passes.cache import ArtifactCache
from optimc_passes.heads.target_model import ModelOpener
from optimc_passes.verify import VerifyLevel


@dataclass(frozen=True)
class PipelineOptions:
    """How the passes are run; nothing here changes the result."""

    cache: ArtifactCache | None = None
    resumable: bool = True
    """Whether the cache outlives this process, so that unfinished work is worth keeping there."""
    verify: VerifyLevel = "numeric"
    dump_graph: Path | None = None
    """Folder that receives the graph after each phase, as text and as ONNX without weights."""
    on_progress: Callable[[str, int, int, str], None] | None = None
    """Called with the step's name, done, total and what the current piece of work is about."""
    max_host_bytes: int | None = None
    """Most memory the process may have resident; passes that need more are refused before the first runs."""
    quality_windows: NDArray[np.int32] | None = None
    """Windows [W, T] of text on which each weight pass is measured; None: none is."""
    unmeasured: str | None = None
    """Why there are no such windows though somebody wanted them; the reports say so."""
    models: ModelOpener | None = None
    """How to run the artifact as it would be served, for passes that train heads; None: this build cannot."""

    def progress_of(self, step: str) -> Progress:
        """Return what a step reports its progress to. Work that begins again after its end, as training does after
        sampling, is a step of its own, named after its label as well."""
        name, is_over = step, False

        def report(done: int, total: int, label: str) -> None:
            nonlocal name, is_over
            if is_over and done < total:
                name = f"{step}: {label}"
            is_over = done >= total
            if self.on_progress is not None:
                self.on_progress(name, done, total, label)

        return report


def pass_label(pass_: Pass[Any], passes: Sequence[Pass[Any]]) -> str:
    """Return the name of one of `passes`, told apart from others of the same name."""
    same = [other for other in passes if other.name == pass_.name]
    return pass_.name if len(same) == 1 else f"{pass_.name} ({same.index(pass_) + 1} of {len(same)})"
