"""The one judge: transformers in float32 with a folder's weights as they are stored, against the original's logits.

    python -m peer_quant.judge --folder DIR --original DIR --text docs=FILE --text own=FILE --record DIR

Whoever wrote the folder, it is read by optimc's readers; one layer of it is also read by the tests' own unpacker, which
shares no code with them. Prints one JSON object. KL is in nats per predicted token, in float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from optimc.measure.reference import TransformersReference
from optimc_passes.checkpoint import Checkpoint
from optimc_passes.load import load_checkpoint
from optimc_passes.weights import Quantized

REPOSITORY = Path(__file__).parents[2]
ROWS = 128
"""Rows brought to float64 at a time."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--original", type=Path, required=True)
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE of int32 [windows, tokens]")
    parser.add_argument("--record", type=Path, required=True, help="where the original's logits are kept")
    options = parser.parse_args()
    checkpoint = _load(options.folder)
    answer: dict[str, Any] = {"texts": {}, **_facts(checkpoint)}
    model: TransformersReference | None = None
    for text in options.text:
        name, _, file = text.partition("=")
        windows = np.load(file)
        recorded = _recorded(options.original, windows, options.record / f"{options.original.name}-{Path(file).stem}")
        model = model or TransformersReference(checkpoint)
        answer["texts"][name] = score(model, windows, recorded)
    answer["cross_checked"] = _cross_check(options.folder, checkpoint)
    print(json.dumps(answer))


def _load(folder: Path) -> Checkpoint:
    with tempfile.TemporaryDirectory() as cache:
        return load_checkpoint(folder, cache_dir=Path(cache))


def _recorded(original: Path, windows: NDArray[np.int32], folder: Path) -> list[Path]:
    """Return files of the original's logits [T, V], computed now or before."""
    files = [folder / f"{number}.npy" for number in range(len(windows))]
    if not all(file.exists() for file in files):
        folder.mkdir(parents=True, exist_ok=True)
        model = TransformersReference(_load(original))
        for window, file in zip(windows, files, strict=True):
            np.save(file.with_suffix(".tmp.npy"), model.logits(window))
            file.with_suffix(".tmp.npy").rename(file)
    return files


def score(model: Any, windows: NDArray[np.int32], recorded: list[Path]) -> dict[str, float]:
    """Return KL, perplexities and top-1 agreement over all predictions of all windows."""
    total = np.zeros(5)
    for window, file in zip(windows, recorded, strict=True):
        own, other = torch.from_numpy(model.logits(window)), torch.from_numpy(np.load(file))
        targets = torch.from_numpy(window.astype(np.int64))
        for start in range(0, len(window) - 1, ROWS):
            stop = min(start + ROWS, len(window) - 1)
            ours = torch.log_softmax(own[start:stop].double(), -1)
            theirs = torch.log_softmax(other[start:stop].double(), -1)
            wanted = targets[start + 1 : stop + 1, None]
            total += [
                stop - start,
                float((theirs.exp() * (theirs - ours)).sum()),
                -float(ours.gather(1, wanted).sum()),
                -float(theirs.gather(1, wanted).sum()),
                int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
            ]
    count, kl, nll, reference, matches = total
    return {
        "predictions": int(count),
        "kl": kl / count,
        "perplexity": float(np.exp(nll / count)),
        "original_perplexity": float(np.exp(reference / count)),
        "top1": matches / count,
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return bits per weight of the quantized layers: payload alone, and with scales and zero points as stored."""
    quantized = [weight for weight in checkpoint.weights.values() if isinstance(weight, Quantized)]
    elements = sum(int(np.prod(weight.shape)) for weight in quantized)
    if not elements:
        return {"payload_bits": None, "stored_bits": None, "method": None}
    payload = sum(int(np.prod(weight.shape)) * weight.bits for weight in quantized)
    extra = sum(
        int(np.prod(weight.scales.shape)) * (16 + (0 if weight.zeros is None else weight.bits)) for weight in quantized
    )
    return {
        "payload_bits": payload / elements,
        "stored_bits": (payload + extra) / elements,
        "quantized_layers": len(quantized),
        "method": quantized[0].method,
    }


def _cross_check(folder: Path, checkpoint: Checkpoint) -> str | None:
    """Compare one layer with the independent unpacker; return its name. Raises AssertionError if they differ."""
    path = REPOSITORY / "tests/passes/formats/unpack.py"
    spec = importlib.util.spec_from_file_location("unpack", path)
    assert spec is not None
    assert spec.loader is not None
    unpack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpack)
    facts = json.loads((folder / "config.json").read_text("utf-8")).get("quantization_config")
    if facts is None:
        return None
    layer = "model.layers.0.self_attn.k_proj"
    weight = checkpoint.weights[f"{layer}.weight"]
    assert isinstance(weight, Quantized)
    tensors: dict[str, NDArray[Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {
            name.removeprefix(f"{layer}."): array
            for name, array in load_file(file).items()
            if name.startswith(f"{layer}.")
        }
    if facts["quant_method"] == "gptq":
        version = 2 if facts.get("checkpoint_format") == "gptq_v2" else 1
        if version == 1 and weight.zeros is not None and not weight.zeros.read().all():
            return None  # writers differ there, and so may readers
        theirs = unpack.unpack_gptq(tensors, weight.bits, weight.shape[1], version=version)
    elif "weight_packed" in tensors:
        theirs = unpack.unpack_compressed(tensors, weight.bits)
    else:
        theirs = unpack.unpack_int8(tensors)
    assert np.array_equal(theirs, weight.dequantize()), layer
    return layer


if __name__ == "__main__":
    main()
