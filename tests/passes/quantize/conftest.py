"""What several tests of passes begin with: a transformers model as an artifact with calibration tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc_passes.artifact import Artifact
from optimc_passes.calibrate import Calibration
from optimc_passes.load import load_checkpoint


@pytest.fixture
def artifact_of(tmp_path: Path) -> Callable[..., Artifact]:
    """Save a model of 96 token ids and load it; `tokens` are those of each of four calibration rows."""

    def make(model: Any, tokens: int = 24) -> Artifact:
        model.save_pretrained(tmp_path)
        rows = tuple(np.random.default_rng(5).integers(0, 96, (4, tokens), np.int32))
        calibration = Calibration(rows, "digest", 4 * tokens, "random tokens")
        return Artifact.start(load_checkpoint(str(tmp_path), cache_dir=tmp_path), calibration)

    return make
