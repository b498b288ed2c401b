"""Building the shape of a 7B Llama, some of its layers, with random weights in shards: how much memory that takes."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from optimc_passes.formats.shard_writer import write_shards
from optimc_passes.weights import Dense
from peer_quant.materials import MODEL, Materials
from peer_quant.process import run_measured

HIDDEN, INTERMEDIATE, HEADS = 4096, 11008, 32
SHARD_BYTES = 1 << 29
STD = 0.02
CALIBRATION = {"samples": 8, "seq_len": 256}

PASSES: dict[str, list[Any]] = {
    "rtn": [{"rtn": {"bits": 4, "group_size": 128, "symmetric": False}}],
    "gptq": [{"gptq": {"bits": 4, "group_size": 128, "symmetric": False}}],
}


def measure_large(method: str, layers: int, materials: Materials) -> dict[str, Any]:
    """Build a plan of so many layers and return wall time and peak memory of the process."""
    folder = materials.work / f"llama-7b-{layers}"
    write_model(materials.model(MODEL), folder, layers)
    data = {
        "model": str(folder),
        "calibration": CALIBRATION,
        "passes": PASSES[method],
        "limits": {"max_seq_len": 512, "max_step_tokens": 64, "max_seqs": 4, "kv_memory": "64MiB"},
        "verify": "shapes",
        "report": {"windows": 0},
    }
    path = materials.recipe(f"large-{method}-{layers}", data)
    plan, cache = materials.work / "made" / "large.plan", materials.work / "made" / "large-cache"
    plan.parent.mkdir(exist_ok=True)
    shutil.rmtree(cache, ignore_errors=True)
    log = materials.work / "logs" / f"large-{method}-{layers}.log"
    command = [sys.executable, "-m", "optimc", "build", str(path), "-o", str(plan), "--cache-dir", str(cache), "--json"]
    run = run_measured(command, log)
    text = log.read_text("utf-8")
    report = json.loads(text[text.index("{\n") :])["passes"][0]
    size = plan.stat().st_size
    plan.unlink()
    shutil.rmtree(cache, ignore_errors=True)
    return {
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
        "pass_peak_bytes": report["peak_bytes"],
        "pass_seconds": report["seconds"],
        "checkpoint_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "plan_bytes": size,
    }


def write_model(like: Path, folder: Path, layers: int) -> None:
    """Write a checkpoint in bfloat16 with the tokenizer of `like`; one tensor in memory at a time."""
    if (folder / "config.json").exists():
        return
    config = json.loads((like / "config.json").read_text("utf-8"))
    scratch = folder.with_name(f".{folder.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(like / name, scratch / name)
    write_shards(dict(_tensors(config["vocab_size"], layers)), scratch, shard_bytes=SHARD_BYTES)
    changed = {
        "dtype": "bfloat16",
        "head_dim": HIDDEN // HEADS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "tie_word_embeddings": False,
    }
    (scratch / "config.json").write_text(json.dumps(config | changed, indent=2), "utf-8")
    scratch.rename(folder)


def _tensors(vocab_size: int, layers: int) -> Iterator[tuple[str, Dense]]:
    yield "model.embed_tokens.weight", _random((vocab_size, HIDDEN), 0)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {f"mlp.{name}_proj": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes |= {"mlp.down_proj": (HIDDEN, INTERMEDIATE)}
        shapes |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        for number, (name, shape) in enumerate(shapes.items()):
            yield f"{prefix}.{name}.weight", _random(shape, 1 + layer * 100 + number)
    yield "model.norm.weight", _random((HIDDEN,), 1 << 20)
    yield "lm_head.weight", _random((vocab_size, HIDDEN), (1 << 20) + 1)


def _random(shape: tuple[int, ...], seed: int) -> Dense:
    """Return a weight that is drawn when it is read: norms of ones, matrices of normal numbers."""
    dtype = np.dtype(ml_dtypes.bfloat16)

    def read() -> NDArray[Any]:
        if len(shape) == 1:
            return np.ones(shape, dtype)
        values = np.random.default_rng(seed).standard_normal(math.prod(shape), np.float32)
        return (values.reshape(shape) * np.float32(STD)).astype(dtype)

    return Dense(shape, dtype, read)
