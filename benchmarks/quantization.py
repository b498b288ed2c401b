"""Quantization of SmolLM2-135M by optimc, GPTQModel and llm-compressor, from the same tokens, before one judge.

    python benchmarks/quantization.py [--sections ours,peers,grid,kv,large] [--peers DIR] [--rows gptq,lc-gptq]

README.md says how DIR is made and how each figure is taken. Rows measured earlier stay in the result until they are
measured again. Exits with 1 if a target that was measured is missed, or a row failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peer_quant.large_model import measure_large
from peer_quant.make_row import make_row
from peer_quant.materials import Materials
from peer_quant.process import CommandError
from peer_quant.report import report
from peer_quant.rows import ROWS
from peer_quant.served import PLANS, measure_served
from peer_quant.targets import judge

from optimc.measure.machine import read_machine

RESULTS = Path(__file__).parent / "results"
SECTIONS = ("ours", "peers", "grid", "kv", "large")


def main() -> int:
    options = _options()
    materials = Materials(options.work.resolve(), options.samples, options.windows, options.length)
    materials.work.mkdir(parents=True, exist_ok=True)
    data = _read(options.output, materials)
    failed = False
    for kind, name, measure in _plan(options, materials):
        started_s = time.perf_counter()
        try:
            figures = measure()
        except (CommandError, AssertionError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        data[kind][name] = figures | {"measured": datetime.now(UTC).isoformat(timespec="seconds")}
        _write(options.output, data)
        kl = figures.get("texts", {}).get("docs", {}).get("kl")
        shown = f", KL {kl:.4f}" if kl is not None else ""
        print(f"{name}: {time.perf_counter() - started_s:.0f} s{shown}", flush=True)
    _write(options.output, data)
    print(report(data))
    missed = any(verdict.outcome == "missed" for verdict in judge(data))
    return int(failed or missed)


def _plan(options: argparse.Namespace, materials: Materials) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yield where a figure is kept, its name and how it is measured."""
    wanted = options.rows
    for row in ROWS:
        if row.section in options.sections and (wanted is None or row.id in wanted):
            yield "rows", row.id, lambda row=row: make_row(row, materials, options.peers)
    if "kv" in options.sections:
        for name in PLANS:
            if wanted is None or name in wanted:
                yield "served", name, lambda name=name: measure_served(name, materials)
    if "large" in options.sections:
        for method in ("rtn", "gptq"):
            for layers in options.layers:
                name = f"{method}-{layers}"
                if wanted is None or name in wanted:
                    yield "large", name, lambda m=method, n=layers: measure_large(m, n, materials)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=_list, default=list(SECTIONS), help=",".join(SECTIONS))
    parser.add_argument("--rows", type=_list, help="only these rows of the sections")
    parser.add_argument("--peers", type=lambda text: Path(text).resolve(), help="folder that setup.sh filled")
    parser.add_argument("--work", type=Path, default=Path(".optimc-cache/quantization"), help="scratch, about 8 GB")
    parser.add_argument("--output", type=Path, default=RESULTS / "quantization.json")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--windows", type=int, default=16, help="evaluation windows")
    parser.add_argument("--length", type=int, default=512, help="tokens per window")
    parser.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")], default=[4, 8])
    options = parser.parse_args()
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    return options


def _list(text: str) -> list[str]:
    return text.split(",")


def _read(path: Path, materials: Materials) -> dict[str, Any]:
    """Return what was measured before with the same tokens, or an empty result."""
    facts = {
        "samples": materials.samples,
        "windows": materials.windows,
        "length": materials.length,
        "calibration": materials.calibration_digest(),
    }
    data: dict[str, Any] = {"facts": facts, "machine": str(read_machine()), "rows": {}, "served": {}, "large": {}}
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        if before["facts"] == facts and before["machine"] == data["machine"]:
            data |= {key: before[key] for key in ("rows", "served", "large")}
        else:
            print(f"{path} was measured with other tokens or on another machine; starting anew", flush=True)
    return data


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    for target, text in ((path, json.dumps(data, indent=1) + "\n"), (path.with_suffix(".md"), report(data))):
        scratch = target.with_suffix(".new")
        scratch.write_text(text, "utf-8")
        scratch.rename(target)


if __name__ == "__main__":
    sys.exit(main())
