"""Making and judging one row: quantize in a process of its own, then let the judge read what it wrote."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from peer_quant.materials import REPOSITORY, Materials
from peer_quant.process import CommandError, run_measured
from peer_quant.rows import Row

BENCHMARKS = REPOSITORY / "benchmarks"
_PEER_ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "GPTQMODEL_CPU_WORKERS": "2",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_GRAPH_PASSES = ("fuse",)


def make_row(row: Row, materials: Materials, peers: Path | None) -> dict[str, Any]:
    """Return a row's figures. Raises CommandError if a process fails or a peer is not installed."""
    output = materials.work / "made" / row.id
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(exist_ok=True)
    log = materials.work / "logs" / f"{row.id}.log"
    facts: dict[str, Any] = {}
    if row.tool == "optimc":
        cache = materials.work / "made" / f"{row.id}-cache"
        shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, "-m", "optimc", "export", str(_recipe(row, materials)), "--format", row.format]
        command += ["-o", str(output), "--cache-dir", str(cache), "--json"]
        run = run_measured(command, log)
        shutil.rmtree(cache, ignore_errors=True)
        facts = _reports(_last_json(log))
    else:
        # They leave logs where they run.
        run = run_measured(_peer_command(row, materials, peers, output), log, env=_PEER_ENV, folder=materials.work)
        facts = _last_json(log)
    judged = _judge(row, materials, output)
    shutil.rmtree(output, ignore_errors=True)
    return {"seconds": run.seconds, "peak_bytes": run.peak_bytes, **facts, **judged}


def _recipe(row: Row, materials: Materials) -> Path:
    if row.recipe is None:
        data: dict[str, Any] = {"passes": [dict(entry) for entry in row.passes], "limits": {"max_seq_len": 2048}}
    else:
        data = materials.shipped(row.recipe)
        data.pop("quality", None)
        data["passes"] = [entry for entry in data["passes"] if entry not in _GRAPH_PASSES]
        for entry in data["passes"]:
            [options] = entry.values()
            if "group_size" in options:
                options.update(row.changes)
    # The peers do not measure what they do, and the judge will.
    data |= {"model": str(materials.model(row.model)), "report": {"windows": 0}}
    data.pop("name", None)
    return materials.recipe(row.id, data)


def _peer_command(row: Row, materials: Materials, peers: Path | None, output: Path) -> list[str]:
    folder = {"llm-compressor": "lc", "GPTQModel": "gm"}[row.tool]
    if peers is None or not (peers / folder / "bin/python").exists():
        raise CommandError(
            f"{row.id}: {row.tool} is not installed; benchmarks/peer_quant/setup.sh DIR, then --peers DIR"
        )
    python = str(peers / folder / "bin/python")
    inputs = [str(materials.model(row.model)), str(materials.calibration()), str(output), "64"]
    if row.tool == "GPTQModel":
        return [python, str(BENCHMARKS / "peer_quant/gptqmodel_worker.py"), *inputs]
    return [python, str(BENCHMARKS / "peer_quant/llmcompressor_worker.py"), row.method.lower(), *inputs]


def _judge(row: Row, materials: Materials, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "peer_quant.judge", "--folder", str(folder)]
    command += ["--original", str(materials.model(row.model)), "--record", str(materials.work / "original")]
    for text in ("docs", "own") if row.own_text else ("docs",):
        command += ["--text", f"{text}={materials.text(text)}"]
    log = materials.work / "logs" / f"{row.id}-judge.log"
    run_measured(command, log, env={"PYTHONPATH": str(BENCHMARKS)})
    return _last_json(log)


def _last_json(log: Path) -> dict[str, Any]:
    """Return the JSON object that a log ends with: on its last line, or indented from a line that opens it."""
    lines = log.read_text("utf-8", "replace").rstrip().splitlines()
    start = len(lines) - 1
    if not lines[start].startswith("{"):
        start = max(number for number, line in enumerate(lines) if line == "{")
    answer: dict[str, Any] = json.loads("\n".join(lines[start:]))
    return answer


def _reports(exported: dict[str, Any]) -> dict[str, Any]:
    """Keep of an export what the result shows."""
    passes = []
    for report in exported["passes"]:
        layers = [layer["error"] for layer in report.get("layers", ()) if layer.get("error") is not None]
        passes.append(
            {
                "name": report["name"],
                "seconds": report["seconds"],
                "config": report["config"],
                "layers": len(report.get("layers", ())),
                "mean_error": float(np.mean(layers)) if layers else None,
                "fallbacks": sum(1 for layer in report.get("layers", ()) if layer.get("fallback")),
                "frontier": report.get("frontier", []),
            }
        )
    return {"passes": passes, "linear_bytes": exported["linear_bytes"], "notes": exported["notes"]}
