"""The lifecycle of a pass. Authors fill in `requires`, `run` and `ensures`; `Pass.__call__` polices.

    result = pass_(artifact, context)      # result.artifact, result.report

A pass never changes what it is given. Weight passes return another store; graph passes are handed a copy of the graph
and may rewrite that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from optimc.errors import OptimcError, PassError
from optimc.plan import FusionReport, PassReport
from optimc.progress import Progress, no_progress
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.memory import PeakMemory
from optimc_passes.weights import Weight

Stage = Literal["weights", "graph"]
Metrics = dict[str, float | int | str]


class PassConfig(BaseModel):
    """Base of all pass configurations: frozen, strict, unknown keys forbidden; the fields are the recipe's YAML keys.

    Each field is followed by a docstring, which is its description in the recipe's JSON schema.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


ConfigT = TypeVar("ConfigT", bound=PassConfig)


@dataclass(frozen=True)
class PassContext:
    """What surrounds a pass while it runs; nothing in here may change its result."""

    done: tuple[str, ...] = ()
    """Names of the passes that ran before."""
    progress: Progress = no_progress
    keep: Callable[[str, Weight], Weight] = lambda _name, weight: weight
    """Hand over a finished weight under its parameter name; use the returned one, which may live on disk."""


@dataclass(frozen=True)
class PassResult:
    """What `run` returns. The artifact's key is set by the base class."""

    artifact: Artifact
    metrics: Metrics = field(default_factory=dict)
    decisions: tuple[str, ...] = ()
    """Choices with their reasons, one sentence each."""
    fusion: FusionReport | None = None
    """What a graph pass matched and declined; the pipeline adds nodes, traffic and error before and after."""


@dataclass(frozen=True)
class PassOutcome:
    """What calling a pass returns."""

    artifact: Artifact
    report: PassReport


class Pass(ABC, Generic[ConfigT]):
    """One transformation. Subclasses set the class attributes and fill in `run`."""

    name: ClassVar[str]
    version: ClassVar[int]
    """Raised whenever the same input and config give another result; cached results of older versions are dead."""
    stage: ClassVar[Stage]
    config_type: ClassVar[type[PassConfig]]
    uses_calibration: ClassVar[bool] = False
    source_digest: ClassVar[str | None] = None
    """SHA-256 of the file a user's pass comes from, so that editing it makes a new result; None for our own."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def requires(self, artifact: Artifact) -> list[str]:  # noqa: ARG002 - subclasses look
        """Return what stands in the way, one sentence each with its remedy; looked at before any work."""
        return []

    @abstractmethod
    def run(self, artifact: Artifact, context: PassContext) -> PassResult:
        """Do the work."""

    def ensures(self, before: Artifact, after: Artifact) -> list[str]:  # noqa: ARG002 - subclasses look
        """Return what the result should have been and is not."""
        return []

    def result_key(self, artifact: Artifact) -> str:
        """Return the content address of what this pass makes of `artifact`."""
        calibration = artifact.calibration.digest if self.uses_calibration and artifact.calibration else None
        parts = [self.name, self.version, self.describe_config(), calibration]
        if self.source_digest is not None:
            parts.append(self.source_digest)
        return derive_key(artifact.key, *parts)

    def describe_config(self) -> dict[str, Any]:
        """Return the configuration as JSON values, defaults included."""
        return self.config.model_dump(mode="json")

    def __call__(self, artifact: Artifact, context: PassContext | None = None) -> PassOutcome:
        """Check, run, check again, and report.

        Raises PassError naming this pass and those before it: conditions that do not hold, and every OptimcError that
        comes out of `run`. Errors of other kinds are our own bugs and pass through.
        """
        context = context or PassContext()
        self._refuse(context, self._stage_problems(artifact) + self.requires(artifact))
        # The graph is the author's to rewrite, so that `artifact` stays what it was.
        private = artifact if artifact.graph is None else artifact.evolve(graph=artifact.graph.clone())
        start = time.perf_counter()
        try:
            with PeakMemory() as memory:
                result = self.run(private, context)
        except PassError:
            raise
        except OptimcError as error:
            raise PassError(self.name, context.done, str(error)) from error
        seconds = time.perf_counter() - start
        after = result.artifact.evolve(key=self.result_key(artifact))
        self._refuse(context, self._shape_problems(artifact, after) + self.ensures(artifact, after))
        report = PassReport(
            name=self.name,
            version=self.version,
            config=self.describe_config(),
            seconds=seconds,
            peak_bytes=memory.peak_bytes,
            metrics=result.metrics,
            decisions=result.decisions,
            fusion=result.fusion,
        )
        return PassOutcome(after, report)

    def _stage_problems(self, artifact: Artifact) -> list[str]:
        if self.stage == "weights" and artifact.graph is not None:
            return ["it changes weights and must come before the graph is attached"]
        if self.stage == "graph" and artifact.graph is None:
            return ["it rewrites the graph, and there is none yet"]
        if self.uses_calibration and artifact.calibration is None:
            return ["it needs calibration text; add a calibration section to the recipe"]
        return []

    def _shape_problems(self, before: Artifact, after: Artifact) -> list[str]:
        """Return changes no pass may make."""
        problems = []
        if self.stage == "weights" and after.graph is not None:
            problems.append("a weight pass returned a graph")
        if self.stage == "graph" and after.weights is not before.weights:
            problems.append("a graph pass changed the weight store")
        problems += [f"{name} is gone" for name in before.weights if name not in after.weights]
        problems += [
            f"{name} has shape {list(after.weights[name].shape)}, had {list(weight.shape)}"
            for name, weight in before.weights.items()
            if name in after.weights and tuple(after.weights[name].shape) != tuple(weight.shape)
        ]
        return problems

    def _refuse(self, context: PassContext, problems: list[str]) -> None:
        if len(problems) == 1:
            raise PassError(self.name, context.done, problems[0])
        if problems:
            listed = "\n".join(f"  {problem}" for problem in problems)
            raise PassError(self.name, context.done, f"{len(problems)} problems\n{listed}")
