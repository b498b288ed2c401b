"""A small world in which every figure is planted: plans of a few bytes, engines that answer with known step times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from optimc.errors import ConfigError, Fault, LoweringError
from optimc.measure.attribution.recipe_file import RecipeFile
from optimc.measure.attribution.surroundings import Surroundings
from optimc.measure.evaluation import EvalResult
from optimc.measure.machine import Machine
from optimc.measure.percentile import Distribution
from optimc.measure.store import MeasurementStore
from optimc.plan import PlanTensor, write_plan
from optimc.recipe import Recipe

MACHINE = Machine("a cpu", 2, None, "", (), 1 << 34, "Linux")


@dataclass
class Figures:
    """What a block reads of a benchmark's result."""

    ttft_ms: Distribution
    tpot_ms: Distribution
    output_tokens_per_s: float | None
    output_tokens_per_s_whole_run: float | None
    requests: int
    failures: dict[str, int]

    @property
    def num_failures(self) -> int:
        return sum(self.failures.values())


@dataclass
class PlantedEngine:
    """Remembers how it was opened."""

    plan: str
    switches: Any
    world: Any

    def close(self) -> None:
        self.world.open_now.remove(self)


@dataclass
class World:
    """TPOT is 10 ms times `slower[factor]` for each factor that is off; everything else follows from it."""

    folder: Path
    make_manifest: Any
    slower: dict[str, float] = field(default_factory=dict)
    together: float | None = None
    """TPOT in ms when everything in `slower` is off, whatever the product."""
    drift: float = 1.0
    """What each block's times are multiplied by, compared with the block before."""
    block_s: float = 10.0
    free_bytes: int | None = 1 << 40
    unbuildable: tuple[str, ...] = ()
    unopenable: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    die_after: int | None = None
    now: float = 0.0
    blocks: list[tuple[str, Any, Any]] = field(default_factory=list)
    """(plan, switches, workload) of each block that was measured."""
    builds: list[str] = field(default_factory=list)
    open_now: list[PlantedEngine] = field(default_factory=list)
    most_open: int = 0

    def recipe(self, *passes: str, **target: Any) -> RecipeFile:
        recipe = Recipe.model_validate(
            {
                "name": "tiny",
                "model": "m",
                "passes": [{"name": name} for name in passes],
                "target": {"int8_activations": False, **target},
                "limits": {"max_seq_len": 512, "max_step_tokens": 64},
            }
        )
        return RecipeFile(recipe, passes, lambda _overrides: recipe)

    def around(self, **changes: Any) -> Surroundings:
        options = {
            "build": self.build,
            "open_engine": self.open_engine,
            "store": MeasurementStore(self.folder / "measurements"),
            "bench": self.bench,
            "machine": MACHINE,
            "available": lambda: self.free_bytes,
            "clock": lambda: self.now,
        }
        return Surroundings(**{**options, **changes})

    def build(self, variant: Any) -> Path:
        self.builds.append(variant.name)
        if variant.name in self.unbuildable:
            raise LoweringError("node 3 has no kernel\nand more")
        path = self.folder / f"{variant.name}.plan"
        manifest = self.make_manifest().model_copy(update={"name": variant.name})
        write_plan(path, manifest, [PlanTensor.from_bytes("weights/x", variant.name.encode())])
        return path

    def open_engine(self, path: Path, switches: Any) -> PlantedEngine:
        if path.stem in self.unopenable:
            raise ConfigError("options", [Fault("--max-seqs", "exceeds the plan's")])
        engine = PlantedEngine(path.stem, switches, self)
        self.open_now.append(engine)
        self.most_open = max(self.most_open, len(self.open_now))
        return engine

    def bench(self, engine: PlantedEngine, workload: Any, _progress: Any) -> Figures:
        if self.die_after is not None and len(self.blocks) == self.die_after:
            raise KeyboardInterrupt
        slow = self.drift ** len(self.blocks)
        self.blocks.append((engine.plan, engine.switches, workload))
        self.now += self.block_s
        off = [name for name in self.slower if self._is_off(name, engine)]
        tpot = 10.0
        for name in off:
            tpot *= self.slower[name]
        if self.together is not None and len(off) == len(self.slower):
            tpot = self.together
        tpot *= slow
        failures = {"HTTP 503": 1} if engine.plan in self.failing else {}
        latency = Distribution(tpot, tpot, None, 8)
        return Figures(latency, latency, 1000 / tpot, 900 / tpot, 8, failures)

    def _is_off(self, name: str, engine: PlantedEngine) -> bool:
        return name in engine.plan or getattr(engine.switches, name, True) is False


@pytest.fixture
def world(tmp_path: Path, make_manifest: Any) -> World:
    return World(tmp_path, make_manifest)


@pytest.fixture
def quality():
    """From a plan's name to its KL per window."""

    def make(windows: dict[str, tuple[float, ...]]):
        def measure(subject: Any) -> EvalResult:
            kl = windows[subject.name]
            return EvalResult(10.0, 9.0, sum(kl) / len(kl), 0.9, 100, kl_windows=kl)

        return measure

    return make
