"""The `quantization_config` that tells other tools how the layers of an exported folder are stored."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import optimc
from optimc_passes.formats.compressed_tensors import INTEGER, PACKED
from optimc_passes.formats.limits import LayerFacts, group_of, nominal_group


def describe_gptq(layers: Sequence[LayerFacts], dense: Sequence[str], version: str) -> dict[str, Any]:
    """Return the description of a GPTQ folder; `dense` names the linear layers that stay plain, the head included.

    Layers that differ from most get a `dynamic` rule each.
    """
    nominal = nominal_group(layers)
    schemes = Counter((layer.bits, group_of(layer, nominal), layer.symmetric) for layer in layers)
    bits, group, symmetric = max(schemes, key=lambda scheme: schemes[scheme])
    dynamic: dict[str, dict[str, Any]] = {}
    for layer in layers:
        scheme = (layer.bits, group_of(layer, nominal), layer.symmetric)
        if scheme != (bits, group, symmetric):
            dynamic[f"+:{_exactly(layer.layer)}"] = {"bits": scheme[0], "group_size": scheme[1], "sym": scheme[2]}
    heads = {layer.layer for layer in layers if layer.is_head}
    dynamic |= {f"-:{_exactly(name)}": {} for name in dense if name != "lm_head"}
    facts: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": any(layer.permuted for layer in layers),
        "lm_head": bool(heads),
        "checkpoint_format": version,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"optimc:{optimc.__version__}"]},
    }
    return facts | ({"dynamic": dynamic} if dynamic else {})


def describe_awq(layers: Sequence[LayerFacts], dense: Sequence[str]) -> dict[str, Any]:
    """Return the description of an AWQ folder in the layout GEMM."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": nominal_group(layers),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(dense),
    }


def describe_compressed(
    layers: Sequence[LayerFacts], dense: Sequence[str], *, int8: bool, static: Sequence[str], per_token: bool
) -> dict[str, Any]:
    """Return the description of a compressed-tensors folder.

    With `int8` weights are plain int8 and activations are rounded too: those of the layers in `static` with a scale of
    their own, others per token if `per_token`.
    """
    nominal = nominal_group(layers)
    members: dict[tuple[Any, ...], list[str]] = {}
    for layer in layers:
        scheme = (layer.bits, group_of(layer, nominal), layer.symmetric, layer.layer in static)
        members.setdefault(scheme, []).append(layer.layer)
    stored_as = INTEGER if int8 else PACKED
    groups = {}
    for number, ((bits, group, symmetric, has_scale), names) in enumerate(members.items()):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(members) == 1 else names,
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": symmetric,
                "strategy": "channel" if group == -1 else "group",
                "group_size": None if group == -1 else group,
                "dynamic": False,
            },
            "input_activations": _activations(has_scale) if int8 and (has_scale or per_token) else None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(dense),
        "kv_cache_scheme": None,
    }


def _activations(has_scale: bool) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor" if has_scale else "token",
        "dynamic": not has_scale,
    }


def _exactly(layer: str) -> str:
    """Return a regular expression for one name and nothing that begins with it."""
    return f"^{re.escape(layer)}$"
