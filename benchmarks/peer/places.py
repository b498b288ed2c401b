"""Where things lie: the peers' folder as setup.sh makes it, and our plans, built when they are out of date."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peer.worker import PeerError

REPOSITORY = Path(__file__).parents[2]
SMOLLM2, LARGE = "smollm2", "llama-587m"


@dataclass(frozen=True)
class Peers:
    """The folder that `benchmarks/peer/setup.sh` filled, or a part of it: any of these may be missing."""

    folder: Path

    @property
    def python(self) -> Path:
        """Of the environment with OpenVINO GenAI and onnxruntime-genai."""
        return self.folder / "run/bin/python"

    def llama_tool(self, name: str) -> Path:
        """One of llama.cpp's programs."""
        return self.folder / "llama.cpp/build/bin" / name

    def gguf(self, model: str) -> Path:
        """The Q4_0 file of a model."""
        return self.folder / f"models/{model}-q4_0.gguf"

    def openvino_model(self, model: str) -> Path:
        """The int4 export of a model for OpenVINO."""
        return self.folder / f"models/{model}-ov"

    def ort_genai_model(self, model: str) -> Path:
        """The int4 export of a model for onnxruntime-genai."""
        return self.folder / f"models/{model}-ort"


RECIPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "smollm2": ("recipes/smollm2-int4-g32.yaml", ()),
    "smollm2-kv8": ("recipes/smollm2-int4-g32.yaml", ("target.kv_dtype=int8",)),
    "smollm2-oracle": ("recipes/smollm2-int4-g32.yaml", ("target={backend: onnxruntime}",)),
    "llama-587m": ("benchmarks/recipes/llama-587m-int4-g32.yaml", ()),
}
"""Plan to its recipe and what is changed in it. The oracle is the same quantized graph with fp32 activations."""


@dataclass
class Plans:
    """Plans by name: from `given`, or built from RECIPES into `folder` by the first who asks."""

    folder: Path
    given: Mapping[str, Path]
    _ready: dict[str, Path] = field(default_factory=dict)

    def __call__(self, name: str) -> Path:
        """Return the plan's path. Raises PeerError if it cannot be built."""
        if name not in self._ready:
            self._ready[name] = self.given[name] if name in self.given else self._build(name)
        return self._ready[name]

    def _build(self, name: str) -> Path:
        recipe, changes = RECIPES[name]
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"peers-{name}.plan"
        command = [sys.executable, "-m", "optimc", "build", recipe, "-o", str(path.resolve())]
        for change in changes:
            command += ["--set", change]
        print(f"building {path.name}", file=sys.stderr, flush=True)
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode != 0:
            raise PeerError(f"{' '.join(command)}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        return path
