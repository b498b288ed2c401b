"""Quantized layers of a checkpoint: which tensors belong to them, and what weights they make.

config.json ── read_quantization ──► QuantScheme ── gather_quantized ──► weights by parameter name, tensors used
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc.wording import listed
from optimc_passes.formats.awq import AwqScheme
from optimc_passes.formats.compressed_tensors import CompressedTensorsScheme
from optimc_passes.formats.gptq import GptqScheme
from optimc_passes.formats.scheme import PackedLayer, QuantScheme
from optimc_passes.quantize.linears import LinearWeight
from optimc_passes.weights import Weight

if TYPE_CHECKING:
    from optimc_passes.load.parameters import ParameterTable
    from optimc_passes.load.safetensors_file import TensorEntry

SCHEMES: Mapping[str, Callable[[Mapping[str, Any], str], QuantScheme]] = {
    GptqScheme.method: GptqScheme,
    AwqScheme.method: AwqScheme,
    CompressedTensorsScheme.method: CompressedTensorsScheme,
}
"""By what `quant_method` calls them."""

QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Where config.json describes quantized weights; the second is older."""


_PACKED_CODES = {"qweight", "weight_packed"}


@dataclass(frozen=True)
class Gathered:
    """The quantized layers of a checkpoint."""

    weights: Mapping[str, Weight]
    """By parameter name."""
    used: frozenset[str]
    """Names of the tensors they are made of."""
    notes: tuple[str, ...]


def quantization_facts(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what a parsed config.json says about quantized weights, or None if they are plain."""
    return next((raw[key] for key in QUANTIZATION_KEYS if raw.get(key)), None)


def read_quantization(facts: Any, where: str) -> QuantScheme:
    """Return the scheme that a checkpoint's configuration describes; `where` is the file it stands in.

    Raises UnsupportedModelError for methods and layouts that are not read, CheckpointError for a damaged description.
    """
    if not isinstance(facts, dict):
        raise CheckpointError(f"{where}: the description of quantized weights must be an object, got {facts!r}")
    method = str(facts.get("quant_method") or ("compressed-tensors" if "config_groups" in facts else ""))
    if method not in SCHEMES:
        raise UnsupportedModelError(
            f"{where}: the checkpoint is quantized already ({method or 'unnamed method'}), which cannot be read; "
            f"readable are {', '.join(SCHEMES)}; start from the original weights and quantize in the recipe"
        )
    return SCHEMES[method](facts, where)


def gather_quantized(
    entries: Mapping[str, TensorEntry],
    scheme: QuantScheme,
    linears: Sequence[LinearWeight],
    parameters: ParameterTable,
    where: str,
) -> Gathered:
    """Collect the tensors of every quantized layer. Codes are not read; scales and zero points are, to be checked.

    Raises CheckpointError where description and tensors contradict each other, naming the layer.
    """
    weights: dict[str, Weight] = {}
    used: set[str] = set()
    notes: list[str] = []
    by_layer = _group_by_layer(entries)
    for linear in linears:
        found = (
            by_layer.get(linear.layer) or by_layer.get(linear.layer.removeprefix(f"{parameters.base_prefix}.")) or {}
        )
        parts = {part: entry for part, entry in found.items() if part in scheme.parts}
        expected = scheme.expects(linear.layer, is_head=linear.is_head)
        if not scheme.is_packed(parts):
            if expected and (parts or "weight" in found):
                what = f"only {listed(sorted(parts))}" if parts else "a plain weight"
                raise CheckpointError(f"{where}: {linear.layer} is quantized, says its description, but has {what}")
            continue
        if expected is False:
            raise CheckpointError(
                f"{where}: {linear.layer} stays dense, says the description, but the checkpoint has "
                f"{listed(sorted(entry.name for entry in parts.values()))}"
            )
        # 8-bit layers of compressed-tensors have their codes under the plain name; packed ones have them elsewhere.
        if "weight" in found and found["weight"].dtype in ("I8", "F8_E4M3") and not _PACKED_CODES & parts.keys():
            parts["weight"] = found["weight"]
        elif "weight" in found:
            raise CheckpointError(f"{where}: {linear.layer} has both a plain weight and {listed(sorted(parts))}")
        weights[linear.name] = scheme.read(PackedLayer(linear.layer, linear.shape, parts, where), notes)
        used.update(entry.name for entry in parts.values())
        if linear.tied_to is not None:
            notes.append(
                f"the configuration ties {linear.name} to {linear.tied_to}, but it is quantized: both are used"
            )
    if not weights:
        raise CheckpointError(f"{where}: weights are quantized ({scheme.method}), says config.json, but none is packed")
    used |= _cache_scales(entries, notes)
    used |= _invented_biases(by_layer, weights, parameters)
    return Gathered(weights, frozenset(used), tuple(dict.fromkeys(notes)))


def _group_by_layer(entries: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """Return tensors by module name and last part of their names."""
    by_layer: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        layer, _, part = name.rpartition(".")
        by_layer.setdefault(layer, {})[part] = entry
    return by_layer


def _cache_scales(entries: Mapping[str, TensorEntry], notes: list[str]) -> set[str]:
    """Return the names of scales for a KV cache: how K and V are stored is for the recipe to say."""
    names = {name for name in entries if name.endswith((".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"))}
    if names:
        some = "1 scale" if len(names) == 1 else f"{len(names)} scales"
        verb = "was" if len(names) == 1 else "were"
        notes.append(f"{some} for a quantized KV cache {verb} not used: target.kv_dtype or kv_quant decides")
    return names


def _invented_biases(
    by_layer: Mapping[str, Mapping[str, TensorEntry]], weights: Mapping[str, Weight], parameters: ParameterTable
) -> set[str]:
    """Return the names of biases of zeros beside quantized layers without one in the model: some writers add them."""
    layers = {name.rpartition(".")[0] for name in weights if f"{name.rpartition('.')[0]}.bias" not in parameters.shapes}
    biases = [by_layer[layer]["bias"] for layer in layers if "bias" in by_layer.get(layer, {})]
    return {entry.name for entry in biases if not entry.read().any()}
