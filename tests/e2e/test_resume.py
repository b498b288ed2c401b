"""A build that is killed goes on at the layer it was in, and ends with the bytes an undisturbed one ends with."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.build import BuildOptions, BuildResult, build_recipe
from optimc.plan import Plan

TEXT = "who wrote the book about the capital of the country and what is it about; the book is what it is. "
GPTQ = {"gptq": {"bits": 4, "group_size": 32}}

KILLED = """
import os, signal, sys
from pathlib import Path
from optimc.build import BuildOptions, build_recipe

recipe, cache, output, step, layer = sys.argv[1:]

def progress(done, total, name):
    if name == step and done == int(layer):
        os.kill(os.getpid(), signal.SIGKILL)

build_recipe(Path(recipe), BuildOptions(output=Path(output), cache_dir=Path(cache)), progress=progress)
"""


@pytest.fixture
def gptq_recipe(make_recipe: Callable[..., Path], tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    words = TEXT.split()
    text.write_text(" ".join(str(rng.choice(words)) for _ in range(600)))
    calibration = {"dataset": str(text), "samples": 6, "seq_len": 48}
    return make_recipe(
        tmp_path / "gptq.yaml", calibration=calibration, passes=[GPTQ], report={"windows": 0}, verify="shapes"
    )


def kill_at(recipe: Path, cache: Path, output: Path, layer: int, step: str = "gptq") -> None:
    """Build in a process of its own that is killed as it starts with a layer."""
    arguments = [sys.executable, "-c", KILLED, str(recipe), str(cache), str(output), step, str(layer)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not output.exists()


def build(recipe: Path, cache: Path, output: Path) -> tuple[BuildResult, dict[str, Any], str]:
    """Return the result, the report of gptq, and the hash over the plan's tensors."""
    result = build_recipe(recipe, BuildOptions(output=output, cache_dir=cache))
    with Plan.open(output) as plan:
        return result, plan.manifest.passes[0].model_dump(), plan.content_hash


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    layers = [{**row, "seconds": 0} for row in report["layers"]]
    return {**report, "layers": layers, "seconds": 0, "peak_bytes": 0, "resumed_at": None}


def test_a_build_killed_after_layer_1_resumes_to_the_same_bytes(gptq_recipe: Path, tmp_path: Path):
    """Killed again a layer later, too. Both builds share the exported graph; the first one's weights are removed."""
    cache, output = tmp_path / "cache", tmp_path / "resumed.plan"
    _, undisturbed, expected = build(gptq_recipe, cache, tmp_path / "undisturbed.plan")
    shutil.rmtree(cache / "weights")
    kill_at(gptq_recipe, cache, output, 1)
    kill_at(gptq_recipe, cache, output, 2)
    _, report, content = build(gptq_recipe, cache, output)
    assert report["resumed_at"] == 2
    assert undisturbed["resumed_at"] is None
    assert content == expected
    assert without_times(report) == without_times(undisturbed)
    # What was finished is in the cache now, and no longer lies beside it.
    assert list((cache / "partial").iterdir()) == []
