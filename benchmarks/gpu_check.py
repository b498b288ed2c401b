"""Everything of the TensorRT target that cannot run without a GPU, in one run.

    python benchmarks/gpu_check.py                                  # builds SmolLM2 in three formats, checks each
    python benchmarks/gpu_check.py --build-only --folder plans/gpu  # anywhere: flavor rtx builds without a GPU
    python benchmarks/gpu_check.py --plan heads.plan=heads.reference.plan

Prints a line per finding as it comes, then the table and, last, one line of JSON. Exit code 0: all passed; 1: something
failed; 2: there is no GPU here. Needs no network: the checkpoint is what `make model` fetched.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpu.check import Outcome, Report
from gpu.plans import RECIPE, VARIANTS, Subject, build_subject, given_subject
from gpu.subject import SubjectCheck
from gpu.timing import bandwidth_of

from optimc.errors import OptimcError
from optimc_runtime.executor.tensorrt.cuda import CudaDevice
from optimc_runtime.executor.tensorrt.requirements import first_gpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parse(arguments)
    variants = [variant for variant in VARIANTS if variant.name in options.only]
    if options.build_only:
        for variant in variants:
            build_subject(variant, options.folder, options.flavor, options.recipe)
        return 0
    try:
        device = first_gpu()
    except OptimcError as error:
        print(f"gpu_check: nothing was checked: {error}", file=sys.stderr)
        return 2
    report, found = Report(), bandwidth_of(device.name)
    bytes_per_s = None if found is None else found[1]
    free, total = device.memory()
    words = f"{device.name}, {device.architecture}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    known = "bandwidth unknown" if found is None else f"{found[1] / 1e9:.0f} GB/s, datasheet of the {found[0]}"
    report.run("machine", "GPU", lambda: iter([Outcome("GPU", None, f"{words}, {known}")]))
    report.run("kernels", "paged attention", lambda: _attention(device, bytes_per_s))
    subjects = [given_subject(text) for text in options.plan]

    def building() -> Iterator[Outcome]:
        for variant in variants:
            subjects.append(build_subject(variant, options.folder, options.flavor, options.recipe))
            yield Outcome(f"build {variant.name}", None, f"{subjects[-1].plan.stat().st_size:,} bytes")

    if not subjects:
        report.run("machine", "build", building)
    for subject in subjects:
        report.run(subject.name, "plan", partial(_checking, report, subject, device, bytes_per_s))
    print(report.table())
    document = json.dumps({"machine": words, "failed": report.failed, "outcomes": report.to_json()})
    if options.json is not None:
        options.json.write_text(document + "\n")
    print(document)
    with suppress(OptimcError):  # a GPU that was lost on the way answers nothing else
        device.close()
    return 1 if report.failed or not subjects else 0


def _attention(device: CudaDevice, bytes_per_s: float | None) -> Iterator[Outcome]:
    """Plans built elsewhere are checked without the compiler's packages; without them this is a finding."""
    from gpu.attention import check_attention

    yield from check_attention(device, bytes_per_s)


def _checking(report: Report, subject: Subject, device: CudaDevice, bytes_per_s: float | None) -> Iterator[Outcome]:
    """A plan that cannot even be read is a finding, too; what is found otherwise has been reported."""
    SubjectCheck(report, subject, device, bytes_per_s).run()
    yield from ()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    names = [variant.name for variant in VARIANTS]
    parser.add_argument(
        "--folder", type=Path, default=Path("plans/gpu"), help="where plans are built or lie up to date"
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument(
        "--flavor", choices=("rtx", "tensorrt"), default="rtx", help="rtx has no data-center GPU but A100"
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="formats to build and check")
    parser.add_argument("--plan", action="append", default=[], metavar="PLAN[=REFERENCE]", help="check these instead")
    parser.add_argument("--build-only", action="store_true", help="build the plans, which rtx does without a GPU")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
