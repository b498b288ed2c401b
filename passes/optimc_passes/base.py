"""The lifecycle of a pass. Authors fill in `requires`, `run` and `ensures`; `Pass.__call__` polices.

    result = pass_(artifact, context)      # result.artifact, result.report

A pass never changes what it is given. Weight passes return another store; graph passes are handed a copy of the graph
and may rewrite that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from optimc.errors import OptimcError, PassError
from optimc.plan import FrontierPoint, FusionReport, HeadsReport, LayerReport, PassReport
from optimc.progress import Progress, no_progress
from optimc.wording import raised, source_file
from optimc_passes.artifact import Artifact, derive_key
from optimc_passes.memory import PeakMemory
from optimc_passes.weights import Weight, WeightStore

if TYPE_CHECKING:
    from optimc_passes.heads.target_model import TargetModel

Stage = Literal["weights", "graph", "heads"]
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
    partial: Path | None = None
    """Folder for work that a later build goes on with if this one is killed; None: there is no such build."""
    scratch: Path | None = None
    """Folder for what does not fit in memory; None: the system's for temporary files."""
    max_host_bytes: int | None = None
    """Most memory the whole process may have resident; None: no limit."""
    open_model: Callable[[Artifact], AbstractContextManager[TargetModel]] | None = None
    """Run the artifact as it would be served; for passes that train heads. None: this build cannot."""


@dataclass(frozen=True)
class PassResult:
    """What `run` returns. The artifact's key is set by the base class."""

    artifact: Artifact
    metrics: Metrics = field(default_factory=dict)
    decisions: tuple[str, ...] = ()
    """Choices with their reasons, one sentence each."""
    fusion: FusionReport | None = None
    """What a graph pass matched and declined; the pipeline adds nodes, traffic and error before and after."""
    layers: tuple[LayerReport, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    calibration_tokens: int | None = None
    resumed_at: int | None = None
    """Decoder layers that were taken over from an earlier build."""
    heads: HeadsReport | None = None
    """How heads were trained or imported."""


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
    source_digest: ClassVar[str | None] = None
    """SHA-256 over the file a user's pass comes from and its class, so that editing it makes a new result; None for our
    own."""

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @property
    def uses_calibration(self) -> bool:
        """Whether the result depends on calibration text. A class attribute may stand in its place."""
        return False

    @property
    def files_digest(self) -> str | None:
        """SHA-256 over files beside the checkpoint that the options name; None if they name none."""
        return None

    def host_bytes(self, artifact: Artifact) -> int:  # noqa: ARG002 - subclasses look
        """Return the most memory `run` needs beyond what the process holds before, in bytes, from shapes alone."""
        return 0

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
        if self.files_digest is not None:
            parts.append(self.files_digest)
        return derive_key(artifact.key, *parts)

    def describe_config(self) -> dict[str, Any]:
        """Return the configuration as JSON values, defaults included."""
        return self.config.model_dump(mode="json")

    def __call__(self, artifact: Artifact, context: PassContext | None = None) -> PassOutcome:
        """Check, run, check again, and report.

        Raises PassError naming this pass and those before it: conditions that do not hold, and every OptimcError that
        comes out of the pass. Errors of other kinds are bugs: of a user's pass they become a PassError that says where
        in its file, our own pass through.
        """
        context = context or PassContext()
        try:
            return self._policed(artifact, context)
        except PassError:
            raise
        except OptimcError as error:
            raise PassError(self.name, context.done, str(error)) from error
        except (Exception, SystemExit) as error:
            if self.source_digest is None:
                raise
            raise PassError(self.name, context.done, raised(error, source_file(type(self)))) from error

    def _policed(self, artifact: Artifact, context: PassContext) -> PassOutcome:
        self._refuse(context, [*self._stage_problems(artifact), *_sentences("requires", self.requires(artifact))])
        private = artifact
        if artifact.graph is not None:
            # The graph is the author's to rewrite, so that `artifact` stays what it was.
            from optimc_passes.graph.freeze_constants import freeze_constants

            freeze_constants(artifact.graph)
            private = artifact.evolve(graph=artifact.graph.clone())
        start = time.perf_counter()
        with PeakMemory() as memory:
            result = self.run(private, context)
        seconds = time.perf_counter() - start
        self._refuse(context, self._result_problems(result))
        after = result.artifact.evolve(key=self.result_key(artifact))
        ensured = _sentences("ensures", self.ensures(artifact, after))
        self._refuse(context, [*self._shape_problems(artifact, after), *ensured])
        try:
            report = PassReport(
                name=self.name,
                version=self.version,
                config=self.describe_config(),
                seconds=seconds,
                peak_bytes=memory.peak_bytes,
                metrics=result.metrics,
                decisions=result.decisions,
                fusion=result.fusion,
                layers=result.layers,
                frontier=result.frontier,
                calibration_tokens=result.calibration_tokens,
                resumed_at=result.resumed_at,
                heads=result.heads,
            )
        except ValidationError as error:
            details = {detail["loc"][:2]: detail["msg"] for detail in error.errors()}
            wrong = [f"its {'.'.join(map(str, place))} cannot be reported: {why}" for place, why in details.items()]
            raise PassError(self.name, context.done, "; ".join(wrong)) from error
        return PassOutcome(after, report)

    def _stage_problems(self, artifact: Artifact) -> list[str]:
        if self.stage == "weights" and artifact.graph is not None:
            return ["it changes weights and must come before the graph is attached"]
        if self.stage == "graph" and artifact.graph is None:
            return ["it rewrites the graph, and there is none yet"]
        if self.stage == "heads" and artifact.graph is None:
            return ["it adds heads to a finished graph, and there is none yet"]
        if self.uses_calibration and artifact.calibration is None:
            return ["it needs calibration text; add a calibration section to the recipe"]
        return []

    def _result_problems(self, result: Any) -> list[str]:
        """Return why `result` is none, if it is none; what it holds is looked at later."""
        if not isinstance(result, PassResult):
            return [f"run returned {type(result).__name__}, want a PassResult"]
        if not isinstance(result.artifact, Artifact):
            return [f"run returned {type(result.artifact).__name__} as the artifact, want an Artifact"]
        problems = []
        if self.stage == "weights" and not isinstance(result.artifact.weights, WeightStore):
            problems.append(f"run returned {type(result.artifact.weights).__name__} as weights, want a WeightStore")
        if self.stage == "graph":
            import onnx_ir as ir

            if not isinstance(result.artifact.graph, ir.Model):
                problems.append(f"run returned {type(result.artifact.graph).__name__} as the graph, want an ir.Model")
        if self.stage == "heads":
            from optimc_passes.heads.heads import Heads

            if not isinstance(result.artifact.heads, Heads):
                problems.append(f"run returned {type(result.artifact.heads).__name__} as heads, want Heads")
        return problems

    def _shape_problems(self, before: Artifact, after: Artifact) -> list[str]:
        """Return changes no pass may make."""
        problems = []
        if self.stage == "weights" and after.graph is not None:
            problems.append("a weight pass returned a graph")
        if self.stage == "graph" and after.weights is not before.weights:
            problems.append("a graph pass changed the weight store")
        if self.stage == "heads" and after.weights is not before.weights:
            problems.append("a pass that adds heads changed the weight store")
        if self.stage != "heads" and after.heads is not before.heads:
            problems.append("heads are for passes of the stage heads to add")
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


def _sentences(method: str, returned: Any) -> list[str]:
    """Return what an author's `requires` or `ensures` returned, refusing what is no list of sentences."""
    if not isinstance(returned, list | tuple) or not all(isinstance(sentence, str) for sentence in returned):
        return [f"{method} returned {returned!r}, want a list of sentences"]
    return list(returned)
