"""`optimc roofline`: how far this machine, or a GPU, allows a plan to go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.ignored_options import ignored_options
from optimc.cli.progress import progress_bar
from optimc.errors import ConfigError, Fault, MeasureError

if TYPE_CHECKING:
    from optimc.measure.roofline.check import CheckRow
    from optimc.measure.roofline.rates import MachineRates
    from optimc.plan import Plan


MOST = 10**6
"""Largest batch or context; more is a slip of the hand."""

_MACHINE_OPTIONS = ("check", "threads", "fresh", "cache_dir")


def roofline(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="An engine.plan.", show_default=False)],
    batch: Annotated[
        str, typer.Option("--batch", help="Numbers of sequences decoded together, with commas.")
    ] = "1,2,4,8,16,32,64",
    context: Annotated[
        str, typer.Option("--context", help="Tokens of each sequence, with commas; cut to the plan's longest.")
    ] = "128,512,2048",
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Floors on this GPU from its datasheet instead: A100, H100, H200, L4, ...."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Then run short benchmarks at batch 1 to 16 and show measured beside bound and predicted; exit with "
            "code 1 if a bound is beaten or a prediction is off by more than 25%.",
        ),
    ] = False,
    threads: options.Threads = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure the machine again, even if it was measured before.")
    ] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            "--cache-dir", help="Where the machine's rates are kept; $OPTIMC_CACHE or .optimc-cache by default."
        ),
    ] = None,
    as_json: options.Json = False,
    invocation: typer.Context = None,  # type: ignore[assignment]  # typer's own; None where this is called as a function
) -> None:
    """Show the least time per token and to the first token the hardware allows, what limits it, and what to expect.

    Bytes and operations are counted from the plan. What the machine can do is measured once (about 20 s) and kept.

    TPOT ≥, TTFT ≥: floors no run beats: bytes over the best bandwidth, or operations over the best rate, if more.

    Predicted: kernels, engine and sampling as they ran in measurements of their own, added up.
    """
    from rich.console import Console

    from optimc.measure.roofline.check import check_table
    from optimc.measure.roofline.gpu_table import Gpu, find_gpu
    from optimc.measure.roofline.rates import MachineRates
    from optimc.measure.roofline.rates_store import try_rates
    from optimc.measure.roofline.roofline import roofline as make_roofline
    from optimc.measure.roofline.table import roofline_table
    from optimc.measure.roofline.work import PlanWork
    from optimc.plan import Plan
    from optimc.storage import cache_folder

    faults: list[Fault] = []
    batches, contexts = _numbers("--batch", batch, faults), _numbers("--context", context, faults)
    faults += ignored_options(invocation, [(gpu is not None, _MACHINE_OPTIONS, "is of this machine; --gpu needs none")])
    if faults:
        raise ConfigError("options", faults)
    with Plan.open(plan_path) as plan:
        PlanWork.of(plan)  # refuses what cannot be counted before the machine is measured
        peaks: MachineRates | Gpu | None
        if gpu is not None:
            peaks = find_gpu(gpu)
        else:
            peaks = try_rates(cache_folder(cache_dir), threads, fresh=fresh)
            if peaks is None:
                raise MeasureError(
                    "this machine is not measured, for lack of memory: free some, or see a GPU's floors with --gpu"
                )
        found = make_roofline(plan, peaks, batches=batches, contexts=contexts)
        rows: tuple[CheckRow, ...] = ()
        if check and isinstance(peaks, MachineRates):
            rows = _check(plan, peaks, threads)
    if as_json:
        typer.echo(json.dumps({**found.to_json(), "check": [row.to_json() for row in rows]}, indent=2))
    else:
        console = Console()
        console.print(roofline_table(found))
        if rows:
            console.print(check_table(rows))
    if not all(row.ok for row in rows):
        raise typer.Exit(1)


def _check(plan: Plan, rates: MachineRates, threads: int | None) -> tuple[CheckRow, ...]:
    """Measure the plan in short closed loops."""
    from optimc.cli.engine_options import load_engine
    from optimc.measure.bench import run_bench
    from optimc.measure.roofline.check import BATCHES
    from optimc.measure.roofline.check import check as run_check
    from optimc.measure.roofline.row_bound import bound_of

    most = plan.manifest.limits.max_seqs
    engine = load_engine(plan, threads=threads)
    try:
        with progress_bar() as progress:
            return run_check(
                lambda workload: run_bench(engine, workload, progress),
                bound_of(plan, rates),
                [each for each in BATCHES if each <= most],
            )
    finally:
        engine.close()


def _numbers(option: str, text: str, faults: list[Fault]) -> tuple[int, ...]:
    """Read "1,2,4"; what is wrong with it is added to `faults`."""
    try:
        numbers = options.numbers_option(text, int, option, "1,2,4")
    except ConfigError as error:
        faults += error.faults
        return ()
    if not numbers:
        faults.append(Fault(option, "names no number"))
    faults += [
        Fault(option, f"must be at least 1 and at most {MOST:,}, got {number:,}")
        for number in numbers
        if not 1 <= number <= MOST
    ]
    return numbers
