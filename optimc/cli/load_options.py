"""From command-line options to a Workload: which options go together, and what they mean as one load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.cli.options import faults_by_option, numbers_option
from optimc.cli.slo_option import parse_slo
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from optimc.measure.load.dataset import LinesDataset
    from optimc.measure.load.traffic import TrafficLine
    from optimc.measure.prompts import Prompt
    from optimc.measure.workload import Workload


def make_workload(
    *,
    concurrency: int | None,
    rate: float | None,
    arrival: str | None,
    dataset_file: Path | None,
    turns: int,
    slo: list[str] | None,
    is_ladder: bool,
    **given: Any,
) -> Workload:
    """Return the load. `given` are further fields of Workload. Raises ConfigError with all faults, by their options."""
    from optimc.measure.load.traffic import traffic_digest
    from optimc.measure.workload import Workload

    faults: list[Fault] = []
    if rate is not None and concurrency is not None:
        faults.append(Fault("--rate", "sends at its own moments, --concurrency as requests end; give one of them"))
    if arrival == "closed":
        faults.append(Fault("--arrival", "is poisson, constant or trace; without it and --rate the loop is closed"))
    if is_ladder and rate is not None:
        faults.append(Fault("--rate", "is what --ladder finds out; --rates names the ones to try"))
    if is_ladder and concurrency is not None:
        faults.append(Fault("--concurrency", "means nothing to --ladder, which sends at rates"))
    if arrival == "trace" and dataset_file is None:
        faults.append(Fault("--arrival", "trace needs --dataset, a file that says when"))
    if turns > 1 and dataset_file is not None:
        faults.append(Fault("--turns", "makes conversations up, --dataset has its own; give one of them"))
    limits = None
    try:
        limits = parse_slo(slo)
    except ConfigError as error:
        faults += error.faults
    if arrival is None:
        arrival = "closed" if rate is None and not is_ladder else "poisson"
    if is_ladder and rate is None and arrival in ("poisson", "constant"):
        rate = 1.0  # stands for those the ladder will try
    kind = "turns" if turns > 1 else "random"
    if dataset_file is not None:
        kind = "trace" if arrival == "trace" else "file"
    fields = {
        "concurrency": 1 if concurrency is None else concurrency,
        "rate_per_s": rate,
        "arrival": arrival,
        "dataset": kind,
        "prompts": None if dataset_file is None else dataset_file.name,
        "dataset_digest": None if dataset_file is None or faults else traffic_digest(dataset_file),
        "turns": turns,
        "slo": limits,
        **given,
    }
    if faults:
        raise ConfigError("options", faults)
    with faults_by_option(rate_per_s="--rate", duration_s="--duration", prompts="--dataset"):
        return Workload(**fields)


def read_dataset(
    path: Path, workload: Workload, encode: Callable[[TrafficLine], Prompt] | None, *, max_tokens: int | None = None
) -> LinesDataset:
    """Return the requests of a file. `encode` turns text into ids, for engines, which take `max_tokens` of prompt and
    answer. Raises ConfigError with all faults."""
    from optimc.measure.load.dataset import lines_dataset, sized_by
    from optimc.measure.load.traffic import read_traffic

    dataset = lines_dataset(list(read_traffic(path)), workload, encode, max_tokens=max_tokens)
    sized_by(workload, dataset)  # refuses what the file is too short for
    return dataset


def parse_rates(text: str | None) -> list[float] | None:
    """Read "1,2,4.5", requests/s. Raises ConfigError."""
    return None if text is None else list(numbers_option(text, float, "--rates", "1,2,4.5"))
