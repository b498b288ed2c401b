"""What every engine starts from: checkpoint, calibration tokens and evaluation texts, made once per work folder.

work/smollm2/           the GGUF file as a folder, float32
work/dithered/          its linear weights moved by up to half a step of the grid they lie on
work/calibration.npy    int32 [rows, tokens]
work/docs.npy, own.npy  evaluation windows: the other topics of the documentation; text the model wrote
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from optimc.build import BuildOptions, build_recipe
from optimc.recipe import CalibrationSpec
from optimc_passes.calibrate import load_tokens
from optimc_passes.calibrate.evaluation_windows import evaluation_windows
from optimc_passes.checkpoint import Checkpoint
from optimc_passes.formats.shard_writer import write_shards
from optimc_passes.load import load_checkpoint
from optimc_passes.load.digest import SIDE_FILES
from optimc_passes.weights import Dense
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

REPOSITORY = Path(__file__).parents[2]
MODEL, DITHERED = "smollm2", "dithered"
GRID = 32
"""Columns that share a step in a Q4_1 file."""
GRID_STEPS = 15


@dataclass(frozen=True)
class Materials:
    """The work folder and the sizes everything in it was made with."""

    work: Path
    samples: int
    windows: int
    length: int

    def model(self, name: str) -> Path:
        """Return the folder of a checkpoint, written now or before."""
        folder = self.work / name
        if not (folder / "config.json").exists():
            source = load_checkpoint(REPOSITORY / "models/smollm2-135m-instruct.gguf", cache_dir=self.work / "cache")
            _write(source, folder, dithered=name == DITHERED)
        return folder

    def calibration(self) -> Path:
        """Return the file of calibration tokens."""
        path = self.work / f"calibration-{self.samples}x{self.length}.npy"
        if not path.exists():
            spec = CalibrationSpec(samples=self.samples, seq_len=self.length)
            np.save(path, np.stack(load_tokens(spec, self._tokenizer()).tokens))
        return path

    def calibration_digest(self) -> str:
        """Return the SHA-256 of the calibration tokens."""
        return hashlib.sha256(np.load(self.calibration()).astype("<i4").tobytes()).hexdigest()

    def text(self, name: str) -> Path:
        """Return the file of a text's windows."""
        path = self.work / f"{name}-{self.windows}x{self.length}.npy"
        if not path.exists():
            windows = (
                evaluation_windows(self._tokenizer(), windows=self.windows, length=self.length)
                if name == "docs"
                else self._own_text()
            )
            np.save(path, windows)
        return path

    def recipe(self, name: str, data: dict[str, Any]) -> Path:
        """Write a recipe into the work folder."""
        path = self.work / "recipes" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({"name": name, **data}, sort_keys=False), "utf-8")
        return path

    def shipped(self, name: str) -> dict[str, Any]:
        """Return a recipe of the repository, with this work folder's calibration size."""
        data: dict[str, Any] = yaml.safe_load((REPOSITORY / "recipes" / f"{name}.yaml").read_text("utf-8"))
        if "calibration" in data:
            data["calibration"] |= {"samples": self.samples, "seq_len": self.length}
        return data

    def _tokenizer(self) -> bytes:
        return (self.model(MODEL) / "tokenizer.json").read_bytes()

    def _own_text(self) -> NDArray[np.int32]:
        """Let the float32 engine write: temperature 1, one seed per window, from nothing but the first token."""
        data = self.shipped("smollm2-fp32") | {"model": str(self.model(MODEL))}
        options = BuildOptions(output=self.work / "own-text.plan", cache_dir=self.work / "cache")
        plan = build_recipe(self.recipe("own-text", data), options).path
        first = 1  # SmolLM2's <|im_start|>, its BOS
        with Engine.load(plan) as engine:
            params = [
                SamplingParams(max_tokens=self.length - 1, min_tokens=self.length - 1, temperature=1.0, seed=seed)
                for seed in range(self.windows)
            ]
            answers = engine.generate([[first]] * self.windows, params)
        return np.array([[first, *answer.token_ids] for answer in answers], np.int32)


def _write(source: Checkpoint, folder: Path, *, dithered: bool) -> None:
    assert source.folder is not None
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    draw = np.random.default_rng(0)
    tensors = {}
    for name, weight in source.weights.items():
        array = weight.read().astype(np.float32)
        tensors[name] = Dense.of(dither(array, draw) if dithered and name.endswith("_proj.weight") else array)
    write_shards(tensors, scratch)
    for name in SIDE_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, scratch / name)
    config = json.loads((scratch / "config.json").read_text("utf-8"))
    (scratch / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2), "utf-8")
    scratch.rename(folder)


def dither(weight: NDArray[np.float32], draw: np.random.Generator) -> NDArray[np.float32]:
    """Move every weight by up to half a step of its block's grid, so that it lies on no grid any more.

    A block of 32 weights of a Q4_1 file is min + code * step with codes 0 .. 15, of which both ends occur.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, columns // GRID, GRID)
    step = (blocks.max(-1, keepdims=True) - blocks.min(-1, keepdims=True)) / GRID_STEPS
    moved = blocks + draw.uniform(-0.5, 0.5, blocks.shape).astype(np.float32) * step
    return moved.reshape(rows, columns).astype(np.float32)
