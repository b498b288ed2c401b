"""What only the engine computes: rounded activations and rounded K and V, teacher-forced through `optimc eval`."""

from __future__ import annotations

import json
import sys
from typing import Any

from peer_quant.materials import MODEL, Materials
from peer_quant.process import run_measured

LIMITS = {"max_seq_len": 2048, "max_step_tokens": 512, "max_seqs": 16, "kv_memory": "1GiB"}

PLANS: dict[str, tuple[str, list[Any] | None]] = {
    "fp32": ("smollm2-fp32", None),
    "kv-int8": ("smollm2-fp32", [{"kv_quant": {"dtype": "int8", "positions": 2048}}, "fuse"]),
    "kv-int4": ("smollm2-fp32", [{"kv_quant": {"dtype": "int4", "positions": 2048}}, "fuse"]),
    "kv-int4-token": ("smollm2-fp32", [{"kv_quant": {"dtype": "int4", "keys": "token", "positions": 2048}}, "fuse"]),
    "gptq": ("smollm2-int4-gptq", None),
    "gptq-kv-int8": ("smollm2-int4-kv8", None),
    "w8a8": ("smollm2-w8a8", None),
}
"""Name to the recipe it is made of, and the passes in place of that recipe's."""

LENGTHS = {"kv-int4": (128, 512, 2000), "kv-int4-token": (128, 512, 2000), "kv-int8": (512, 2000)}
"""Tokens per window, where context is what matters; elsewhere the evaluation's own length."""


def measure_served(name: str, materials: Materials) -> dict[str, Any]:
    """Build a plan and return its KL from the original model by length of the windows."""
    recipe, passes = PLANS[name]
    data = materials.shipped(recipe)
    data.pop("quality", None)
    data |= {"model": str(materials.model(MODEL)), "limits": LIMITS, "report": {"windows": 0}}
    data.setdefault("calibration", {"samples": materials.samples, "seq_len": materials.length})
    if passes is not None:
        data["passes"] = passes
    data.pop("name", None)
    plan = materials.work / "made" / f"{name}.plan"
    plan.parent.mkdir(exist_ok=True)
    cache = str(materials.work / "cache")
    path = materials.recipe(f"served-{name}", data)
    build_log = materials.work / "logs" / f"served-{name}-build.log"
    run = run_measured(
        [sys.executable, "-m", "optimc", "build", str(path), "-o", str(plan), "--cache-dir", cache], build_log
    )
    lengths = {}
    for length in LENGTHS.get(name, (materials.length,)):
        windows = max(1, min(materials.windows, materials.windows * materials.length // length))
        log = materials.work / "logs" / f"served-{name}-{length}.log"
        command = [sys.executable, "-m", "optimc", "eval", str(plan), "--json", "--cache-dir", cache]
        run_measured([*command, "--windows", str(windows), "--length", str(length)], log)
        lengths[str(length)] = _figures(log.read_text("utf-8"))
    plan.unlink()
    return {"build_seconds": run.seconds, "build_peak_bytes": run.peak_bytes, "lengths": lengths}


def _figures(text: str) -> dict[str, Any]:
    facts = json.loads(text[text.index("{\n") :])
    return {
        "kl": facts["kl_mean"],
        "perplexity": facts["perplexity"],
        "top1": facts["top1_agreement"],
        "tokens": facts["tokens"],
    }
