"""Where a machine's rates are kept: measured once per machine, number of threads, instruction set and native module."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from optimc.errors import MeasureError
from optimc.measure.machine import Machine, available_bytes, read_machine
from optimc.measure.roofline.rates import MachineRates
from optimc.storage import write_whole

LEAST_MEMORY_BYTES = 3 << 30
"""Measuring takes about 1.1 GiB at once; nobody else is to be pressed out of memory for it."""


def rates_path(cache: Path, machine: Machine, threads: int, instruction_set: str, native: str) -> Path:
    """Return the file that rates measured under these circumstances are in."""
    return cache / "machine" / f"{machine.id}-{threads}-{instruction_set}-{native}.json"


def load_rates(path: Path) -> MachineRates | None:
    """Return the rates in a file; None if there is none. Raises MeasureError if it is damaged or cannot be read."""
    try:
        return MachineRates.from_json(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise MeasureError(f"{path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise MeasureError(f"{path}: not a machine's rates ({error!r}); delete it, or measure with --fresh") from error


def save_rates(path: Path, rates: MachineRates) -> None:
    """Keep the rates, in place of earlier ones. Raises StorageError, and leaves those, if there is no room for them."""
    write_whole("the machine's rates", path, json.dumps(rates.to_json(), indent=2))


def try_rates(
    cache: Path,
    threads: int | None = None,
    *,
    fresh: bool = False,
    measure: Callable[[int], MachineRates] | None = None,
) -> MachineRates | None:
    """Return this machine's rates: from the cache, or measured now and kept, which is said on standard error.

    `fresh` measures in any case. Of earlier rates, of other native modules too, the peaks are kept where they were
    better: what a machine has once done, it can do, and some run faster at one hour than at the next.

    None if too little memory is free to measure them, which is said too. Raises MeasureError if the file is damaged,
    StorageError if the rates cannot be kept.
    """
    from optimc_runtime import _native
    from optimc_runtime.executor.cores import usable_cores

    threads = usable_cores() if threads is None else threads
    path = rates_path(cache, read_machine(), threads, _native.default_instruction_set(), native_version())
    if not fresh and (known := load_rates(path)) is not None:
        return known
    available = available_bytes()
    if available is not None and available < LEAST_MEMORY_BYTES:
        print(
            f"this machine's rates are not measured: {available >> 20:,} MiB of memory are free, it takes "
            f"{LEAST_MEMORY_BYTES >> 20:,}; no bound is known until that much is free",
            file=sys.stderr,
        )
        return None
    if measure is None:
        from optimc.measure.roofline.probe import measure_rates

        measure = measure_rates
    print(f"measuring what this machine can do, once, about 20 s ({threads} threads) ...", file=sys.stderr)
    rates = measure(threads)
    for earlier in _earlier(path):
        rates = rates.with_peaks_of(earlier)
    save_rates(path, rates)
    return rates


def _earlier(path: Path) -> Iterator[MachineRates]:
    """Yield all sound rates of the same machine, threads and instruction set, whatever the native module."""
    circumstances = path.stem.rpartition("-")[0]
    for sibling in sorted(path.parent.glob(f"{circumstances}-*.json")):
        rates = None
        with suppress(MeasureError):  # a damaged one is what `fresh` is asked to replace
            rates = load_rates(sibling)
        if rates is not None:
            yield rates


def native_version() -> str:
    """Return twelve hex digits of the native module's own bytes: other kernels are measured again."""
    from optimc_runtime import _native

    assert _native.__file__ is not None
    return hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:12]
