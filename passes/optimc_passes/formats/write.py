"""Writing a checkpoint folder that other tools load: packed weights, the source's other files, our own config.json.

    weights ── check ── pack ──► temporary folder ── reload and compare ── rename ──► the folder

Nothing is at the folder's place before everything in it has been read back and found equal.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from optimc.errors import CheckpointError, ConfigError, Fault
from optimc.progress import Progress, no_progress
from optimc.storage import storing
from optimc.wording import listed
from optimc_passes.checkpoint import Checkpoint
from optimc_passes.choices import KV_PREFIX
from optimc_passes.formats import awq, compressed_tensors, gptq
from optimc_passes.formats.describe import describe_awq, describe_compressed, describe_gptq
from optimc_passes.formats.limits import FormatName, LayerFacts, format_problems, ragged_layers
from optimc_passes.formats.read import QUANTIZATION_KEYS
from optimc_passes.formats.scheme import narrow_scales
from optimc_passes.formats.shard_writer import SHARD_BYTES, write_shards
from optimc_passes.formats.whole_folder import whole_folder
from optimc_passes.load.config import CONFIG_NAME, QUANTIZE_NAME
from optimc_passes.load.digest import SIDE_FILES
from optimc_passes.load.json_file import read_json_object
from optimc_passes.load.load_checkpoint import load_checkpoint
from optimc_passes.quantize.linears import LinearWeight, linear_weights
from optimc_passes.weights import Dense, Quantized, Weight

_NOT_COPIED = (CONFIG_NAME, QUANTIZE_NAME)


@dataclass(frozen=True)
class Written:
    """A checkpoint folder on disk."""

    folder: Path
    num_layers: int
    """Linear layers that are quantized."""
    linear_bytes: int
    """What they take."""
    size_bytes: int
    """All tensors."""
    notes: tuple[str, ...]


def layer_facts(linears: Sequence[LinearWeight], weights: Mapping[str, Weight]) -> list[LayerFacts]:
    """Return what formats ask about, for every linear layer that is quantized."""
    found = []
    for linear in linears:
        weight = weights.get(linear.name)
        if isinstance(weight, Quantized):
            facts = LayerFacts(
                linear.layer,
                linear.shape,
                weight.bits,
                weight.group,
                symmetric=weight.symmetric,
                is_head=linear.is_head,
                permuted=weight.permutation is not None,
            )
            found.append(facts)
    return found


def nothing_quantized() -> ConfigError:
    """Return the error that says that there is nothing to export."""
    return ConfigError("export", [Fault("passes", "no layer is quantized, so there is nothing this format is for")])


def refuse(format_name: FormatName, layers: Sequence[LayerFacts]) -> None:
    """Raise ConfigError naming everything among these layers that the format cannot hold."""
    problems = format_problems(format_name, layers)
    if problems:
        raise ConfigError("export", [Fault(f"--format {format_name}", problem) for problem in problems])


def write_checkpoint(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    format_name: FormatName,
    folder: Path,
    *,
    per_token_activations: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = no_progress,
) -> Written:
    """Write `weights` as a checkpoint of `checkpoint`'s model into `folder`, which must not exist or be empty.

    Linear layers that are quantized are packed, everything else keeps its dtype. `per_token_activations` says that
    8-bit layers were made for activations rounded per token (W8A8). Memory holds one tensor at a time.

    Raises ConfigError if the format cannot hold the layers, CheckpointError if what was written reads back different,
    StorageError if it cannot be written.
    """
    assert checkpoint.folder is not None, "a checkpoint that lies somewhere"
    linears = linear_weights(checkpoint.config)
    facts = layer_facts(linears, weights)
    if not facts:
        raise nothing_quantized()
    refuse(format_name, facts)
    _refuse_other_quantized(facts, weights)
    packing = _packing(format_name, linears, facts, weights, per_token_activations=per_token_activations)
    tensors, linear_bytes = _tensors(linears, weights, packing.pack)
    with whole_folder("the checkpoint", folder) as partial:
        with storing("the checkpoint", folder):
            size = write_shards(tensors, partial, shard_bytes=shard_bytes, progress=progress)
            _copy_side_files(checkpoint.folder, partial)
            _write_config(checkpoint, weights, linears, packing.description, partial)
        _compare(partial, weights)
    return Written(folder, len(facts), linear_bytes, size, tuple(packing.notes))


@dataclass(frozen=True)
class _Packing:
    """How one export packs layers and describes them."""

    pack: Callable[[Quantized], dict[str, Dense]]
    description: dict[str, Any]
    notes: list[str]


def _packing(
    format_name: FormatName,
    linears: Sequence[LinearWeight],
    facts: Sequence[LayerFacts],
    weights: Mapping[str, Weight],
    *,
    per_token_activations: bool,
) -> _Packing:
    packed = {layer.layer for layer in facts}
    dense = [linear.layer for linear in linears if linear.layer not in packed]
    quantized = {layer.layer: _quantized(weights, layer.layer) for layer in facts}
    notes = _wide_scales(quantized)
    static = [layer for layer, weight in quantized.items() if weight.activation_scale is not None]
    if format_name == "compressed-tensors":
        int8 = (bool(static) or per_token_activations) and all(_is_w8a8(layer) for layer in facts)
        if static and not int8:
            notes.append("static scales of activations are not written: not all layers are 8 bits per row")
        description = describe_compressed(
            facts, dense, int8=int8, static=static if int8 else (), per_token=per_token_activations
        )
        return _Packing(compressed_tensors.int8_layer if int8 else compressed_tensors.pack_layer, description, notes)
    if static:
        notes.append(f"static scales of activations are not written: {format_name} has no place for them")
    if format_name == "awq":
        return _Packing(awq.pack_layer, describe_awq(facts, dense), notes)
    version = gptq.choose_version(all(layer.symmetric for layer in facts))
    if version == gptq.V2:
        notes.append(
            f"written as {version}, since the older form has no agreed bits for zero points of 0; symmetric: true "
            "makes a folder for tools that know the older form only"
        )
    ragged = ragged_layers(facts)
    if ragged:
        notes.append(
            f"the last group is smaller than the others in {listed(ragged)}: optimc reads that, most other tools "
            "want groups that divide the inputs"
        )
    return _Packing(lambda weight: gptq.pack_layer(weight, version), describe_gptq(facts, dense, version), notes)


def _tensors(
    linears: Sequence[LinearWeight], weights: Mapping[str, Weight], pack: Callable[[Quantized], dict[str, Dense]]
) -> tuple[dict[str, Dense], int]:
    """Return every tensor of the folder by name, and the bytes of those that quantized layers are made of."""
    layers = {linear.name: linear.layer for linear in linears}
    tensors: dict[str, Dense] = {}
    linear_bytes = 0
    for name, weight in weights.items():
        if name.startswith(KV_PREFIX):
            continue
        if isinstance(weight, Dense):
            tensors[name] = weight
            continue
        parts = {f"{layers[name]}.{part}": tensor for part, tensor in pack(weight).items()}
        linear_bytes += sum(tensor.nbytes for tensor in parts.values())
        tensors |= parts
    return tensors, linear_bytes


def _quantized(weights: Mapping[str, Weight], layer: str) -> Quantized:
    weight = weights[f"{layer}.weight"]
    assert isinstance(weight, Quantized)
    return weight


def _refuse_other_quantized(facts: Sequence[LayerFacts], weights: Mapping[str, Weight]) -> None:
    known = {f"{layer.layer}.weight" for layer in facts}
    others = sorted(name for name, weight in weights.items() if isinstance(weight, Quantized) and name not in known)
    if others:
        message = f"{listed(others)} is quantized and no linear layer; no format here holds that"
        raise ConfigError("export", [Fault("passes", message)])


def _is_w8a8(layer: LayerFacts) -> bool:
    return layer.bits == 8 and layer.symmetric and layer.group == layer.shape[1]


def _wide_scales(quantized: Mapping[str, Quantized]) -> list[str]:
    wide = [name for name, weight in quantized.items() if narrow_scales(weight.scales.read()).dtype != np.float16]
    if not wide:
        return []
    return [f"scales of {listed(wide)} are float32, since float16 does not hold them exactly; some tools cast them"]


def _copy_side_files(source: Path, target: Path) -> None:
    for name in SIDE_FILES:
        if name not in _NOT_COPIED and (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_config(
    checkpoint: Checkpoint,
    weights: Mapping[str, Weight],
    linears: Sequence[LinearWeight],
    description: Mapping[str, Any],
    target: Path,
) -> None:
    """Write config.json: the source's own, with the weights' description and what is true of the head."""
    assert checkpoint.folder is not None
    raw = read_json_object(checkpoint.folder / CONFIG_NAME)
    # The folder has no Python code of the source's, and the old description says nothing true any more.
    config = {key: value for key, value in raw.items() if key not in ("auto_map", *QUANTIZATION_KEYS)}
    own_head = any(linear.tied_to is not None and linear.name in weights for linear in linears)
    config["tie_word_embeddings"] = bool(checkpoint.config.tie_word_embeddings) and not own_head
    config["quantization_config"] = dict(description)
    (target / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _compare(folder: Path, weights: Mapping[str, Weight]) -> None:
    """Load the folder as anybody would and compare every weight. Raises CheckpointError if one differs."""
    with tempfile.TemporaryDirectory() as cache:
        loaded = load_checkpoint(folder, cache_dir=Path(cache)).weights
    wanted = {name: weight for name, weight in weights.items() if not name.startswith(KV_PREFIX)}
    missing = sorted(set(wanted) ^ set(loaded))
    if missing:
        raise CheckpointError(f"the export does not read back: {listed(missing)} on one side only; please report it")
    for name, weight in wanted.items():
        if not _same(weight, loaded[name]):
            raise CheckpointError(f"the export does not read back: {name} differs; please report it")


def _same(first: Weight, second: Weight) -> bool:
    if isinstance(first, Dense) or isinstance(second, Dense):
        same_kind = isinstance(first, Dense) and isinstance(second, Dense) and first.dtype == second.dtype
        return same_kind and np.array_equal(first.read(), second.read())  # type: ignore[union-attr]
    # A permutation may come back with the columns of a group in another order; what it means must be the same.
    return first.bits == second.bits and np.array_equal(first.dequantize(), second.dequantize())
