"""optimc and its peers (llama.cpp, OpenVINO GenAI, onnxruntime-genai) on this machine, in turns, against the targets
optimc has to reach.

    python benchmarks/peers.py --only cpu --peers DIR [--plans plans] [--sections decode,prefill] [--rounds N]

README.md says how DIR is made and how each figure is taken. A peer that is not set up in DIR is left out, and each
section's notes say so. Sections measured earlier stay in the result until they are measured again. Exits with 1 if a
target that was measured is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peer.machine_probe import MachineProbe
from peer.names import UNITS
from peer.places import RECIPES, Peers, Plans
from peer.samples import Samples
from peer.sections import SECTIONS, Bench
from peer.table import report, states
from peer.targets import judge
from peer.worker import PeerError

from optimc.measure.machine import read_machine

RESULTS = Path(__file__).parent / "results"
TITLE = "The CPU engine beside llama.cpp, OpenVINO GenAI and onnxruntime-genai"


def main() -> int:
    options = _options()
    data = _read(options.output)
    probe = MachineProbe()
    bench = Bench(Peers(options.peers), Plans(options.plans, dict(options.plan)), probe, options.rounds)
    print(f"{read_machine()}\nnow: {probe()}", flush=True)
    failed = False
    for name in options.sections:
        started_s = time.perf_counter()
        try:
            samples = SECTIONS[name](bench)
        except (PeerError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        data["sections"][name] = samples.to_json() | {
            "measured": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": str(read_machine()),
        }
        _write(options.output, data)
        print(f"{name}: {time.perf_counter() - started_s:.0f} s; {states(samples)}", flush=True)
    print(f"now: {probe()}\n\n{_report(data)}")
    missed = any(verdict.outcome == "fail" for verdict in judge(_sections(data)))
    return int(failed or missed)


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["cpu"], default="cpu", help="the target whose peers are measured")
    parser.add_argument("--peers", type=_folder, required=True, help="folder made by benchmarks/peer/setup.sh")
    parser.add_argument("--plans", type=Path, default=Path("plans"), help="where plans are built")
    parser.add_argument("--plan", type=_plan, action="append", default=[], metavar="NAME=PATH",
                        help=f"a plan that is built already; names: {', '.join(RECIPES)}")  # fmt: skip
    parser.add_argument("--sections", type=_section_names, default=list(SECTIONS), metavar="NAME,...",
                        help=f"of {', '.join(SECTIONS)}; all by default")  # fmt: skip
    parser.add_argument("--rounds", type=int, help="rounds per section; three or five by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu-peers.json", help="the table goes beside it")
    return parser.parse_args(arguments)


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is no folder; `benchmarks/peer/setup.sh {text}` makes it")
    return Path(text).resolve()


def _plan(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in RECIPES or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=PATH of a file, NAME one of {', '.join(RECIPES)}")
    return name, Path(path)


def _section_names(text: str) -> list[str]:
    unknown = sorted(set(text.split(",")) - set(SECTIONS))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in text.split(",")]


def _read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {"sections": {}}
    return data


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")
    path.with_suffix(".md").write_text(_report(data), "utf-8")


def _report(data: dict[str, Any]) -> str:
    measured = {name: section["measured"] for name, section in data["sections"].items()}
    machines = sorted({section["machine"] for section in data["sections"].values()})
    sections = _sections(data)
    return report(TITLE, "\n\n".join(machines), measured, sections, judge(sections))


def _sections(data: dict[str, Any]) -> dict[str, Samples]:
    return {name: Samples.from_json(data["sections"][name]) for name in UNITS if name in data["sections"]}


if __name__ == "__main__":
    sys.exit(main())
