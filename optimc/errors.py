"""Every error a user can meet, in one tree.

    OptimcError                      one line for the user; the CLI prints it and exits with code 2
    ├── ConfigError                  recipe or options: all faults at once
    ├── UnknownNameError             a name nobody registered; lists the known ones
    ├── MissingExtraError            an optional dependency is not installed; says which extra brings it
    ├── CheckpointError              the model's files are missing, damaged or contradict each other
    ├── UnsupportedModelError        the model is sound, but optimc cannot compile it; names what is missing
    ├── CalibrationError             too little text, or not the text that was asked for
    ├── PassError                    a pass failed; names it and those that ran before it
    │   └── VerifyError              the graph after a pass breaks a rule or computes something else
    ├── LoweringError                a node has no kernel on the chosen target
    ├── StorageError                 a plan, a cache entry or a dumped graph cannot be written
    ├── PlanError                    engine.plan cannot be used
    │   ├── PlanCorruptError         truncated, damaged, or not a plan at all
    │   ├── PlanVersionError         written by another format version
    │   └── PlanTargetError          built for something this machine is not
    ├── RequestError                 a request that can never be served (HTTP 400)
    ├── OverloadedError              a request refused for now (HTTP 429)
    ├── EngineError                  a step failed; the requests in it are lost, the engine goes on
    └── MeasureError                 a benchmark or evaluation that cannot be trusted

Misuse by our own code is an `assert` or a plain `ValueError`, never one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class OptimcError(Exception):
    """Base of everything a user can cause or must know; `str(error)` is one readable line or list."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a configuration: where it stands and what to do about it."""

    where: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line is not None else ""
        return f"{place}{self.where}: {self.message}" if self.where else f"{place}{self.message}"


class ConfigError(OptimcError):
    """A recipe or option set with one or more faults, all reported together."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        self.source = source
        self.faults = tuple(faults)
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {fault}" for fault in self.faults)]))


class UnknownNameError(OptimcError):
    """A name that is not registered; the message lists the known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(f"unknown {kind} '{name}'; known: {', '.join(sorted(known)) or 'none'}")


class MissingExtraError(OptimcError):
    """A dependency that belongs to an extra is not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {module}: pip install 'optimc[{extra}]'")


class CheckpointError(OptimcError):
    """The checkpoint's files are missing, damaged or contradict each other."""


class UnsupportedModelError(OptimcError):
    """The checkpoint is sound, but uses something optimc cannot compile."""


class CalibrationError(OptimcError):
    """Calibration or evaluation text is missing or too short."""


class PassError(OptimcError):
    """A pass failed. The message names the pass and the passes that ran before it."""

    def __init__(self, name: str, done: Sequence[str], message: str) -> None:
        self.name = name
        self.done = tuple(done)
        super().__init__(f"{name} failed after [{', '.join(done)}]: {message}")


class VerifyError(PassError):
    """The graph after a pass breaks a dialect rule, or no longer computes what it computed before.

    `node` is the node that is at fault, where one could be found.
    """

    def __init__(self, name: str, done: Sequence[str], message: str, *, node: str | None = None) -> None:
        self.node = node
        super().__init__(name, done, message)


class LoweringError(OptimcError):
    """A node of the graph has no implementation on the chosen target."""


class StorageError(OptimcError):
    """A file of ours cannot be written: no room, no permission, no such folder."""


class PlanError(OptimcError):
    """An engine.plan that cannot be used."""


class PlanCorruptError(PlanError):
    """Truncated, damaged, or not an engine.plan."""


class PlanVersionError(PlanError):
    """Written in a format version this optimc does not read."""


class PlanTargetError(PlanError):
    """Built for a target, library version or machine that is not the one at hand."""


class RequestError(OptimcError):
    """A request that can never be served as it stands. `param` names the offending field."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class OverloadedError(OptimcError):
    """A request refused because the queue is full; `retry_after_s` is when to come back."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class EngineError(OptimcError):
    """A step failed inside the engine; the requests that were in it are lost."""


class MeasureError(OptimcError):
    """A measurement that cannot be taken or must not be trusted."""
