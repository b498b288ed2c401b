"""What a recipe's `smoothquant` asks of its target: activations rounded the way its scales were found for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from optimc.recipe import TargetSpec
from optimc.recipe.load import Finding


def activation_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield targets that do not round activations as a `smoothquant` pass wants them rounded.

    `data` is a parsed recipe; parts of a wrong shape are others' to report.
    """
    from optimc_passes.quantize.smoothquant import SmoothQuant, SmoothQuantConfig

    try:
        target = TargetSpec.model_validate(data.get("target") or {})
    except ValidationError:
        return
    entries = data.get("passes")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        name = next(iter(entry), None) if isinstance(entry, dict) else entry
        if name != SmoothQuant.name:
            continue
        try:
            config = SmoothQuantConfig.model_validate((entry[name] if isinstance(entry, dict) else None) or {})
        except ValidationError:
            continue
        place = ("passes", index, SmoothQuant.name, "activations")
        if config.activations == "static":
            if target.backend != "onnxruntime" and target.int8_activations is False:
                yield place, "static scales round activations, and target int8_activations: false forbids it"
        elif target.backend == "onnxruntime":
            yield place, "the onnxruntime target has no scale per token; use activations: static"
        elif target.activation_scales != "row":
            yield place, "one scale per token is target `activation_scales: row`; set it, or use activations: static"
