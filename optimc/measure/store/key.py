"""What determines a measurement. Equal keys, equal figures, but for noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from optimc.measure.load.ladder import SEARCH_VERSION
from optimc.measure.machine import Machine
from optimc.measure.store.engine_code import engine_code
from optimc.measure.store.engine_switches import EngineSwitches
from optimc.measure.store.subject import PlanSubject
from optimc.measure.workload import Workload

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def measurement_key(
    subject: PlanSubject,
    workload: Workload | None,
    engine: EngineSwitches,
    machine: Machine,
    what: str,
    details: Mapping[str, Any] = _NOTHING,
) -> dict[str, Any]:
    """Return the key of a measurement of the kind `what`: "bench", "quality", "ladder" or "pair".

    `workload` is None where no load is sent. `details` is what else the figures depend on, JSON values.
    """
    source = subject.manifest.source
    load = None if workload is None else {**workload.to_json()}
    if load is not None:
        # Eight requests are eight requests, whether somebody asked for them or not, and a file is what it holds,
        # whatever its name.
        for name in ("by_default", "prompts"):
            load.pop(name, None)
    return {
        "what": what,
        "plan": subject.content_hash,
        "serving": subject.serving_hash,
        "source": [source.model, source.model_hash],
        "machine": machine.id,
        "engine": engine.to_json(),
        "workload": load,
        "details": dict(details),
        "versions": _versions(subject),
    }


def quality_key(
    subject: PlanSubject, engine: EngineSwitches, machine: Machine, *, windows: int, length: int
) -> dict[str, Any]:
    """Return the key of `optimc eval`'s figures over `windows` windows of `length` tokens each."""
    return measurement_key(subject, None, engine, machine, "quality", {"windows": windows, "length": length})


def ladder_key(
    subject: PlanSubject,
    workload: Workload,
    engine: EngineSwitches,
    machine: Machine,
    *,
    attain: float,
    rates: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Return the key of a ladder of `workload`, which has the limits; `rates` are those asked for, in requests/s, and
    None where they are searched."""
    tried = {"search": SEARCH_VERSION} if rates is None else {"rates": [float(rate) for rate in rates]}
    return measurement_key(subject, workload, engine, machine, "ladder", {"attain": attain, **tried})


def _versions(subject: PlanSubject) -> dict[str, str]:
    """Versions of what runs the plan: optimc, its engine's code, and the backend if it is a package of its own."""
    found = {"engine": engine_code()}
    target = subject.manifest.target
    for package in ("optimc", target.backend, *(name for name in target.requirements if name != "gpu")):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "built in"
    return found
