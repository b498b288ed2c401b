"""What a recipe asks of heads and of its target that cannot both be had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from optimc.recipe import LimitsSpec, TargetSpec
from optimc.recipe.load import Finding


def heads_findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield `medusa` passes that train more heads than a step of the cpu target has rows: they are evaluated together.

    `data` is a parsed recipe; parts of a wrong shape are others' to report.
    """
    from optimc_passes.heads.config import MedusaConfig
    from optimc_passes.heads.medusa import Medusa

    try:
        target = TargetSpec.model_validate(data.get("target") or {})
        limits = LimitsSpec.model_validate(data.get("limits") or {})
    except ValidationError:
        return
    entries = data.get("passes")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        name = next(iter(entry), None) if isinstance(entry, dict) else entry
        if name != Medusa.name or target.backend != "cpu":
            continue
        try:
            config = MedusaConfig.model_validate((entry[name] if isinstance(entry, dict) else None) or {})
        except ValidationError:
            continue
        if config.from_ is None and config.heads > limits.max_step_tokens:
            message = (
                f"{config.heads} heads are evaluated in one step, and limits max_step_tokens is "
                f"{limits.max_step_tokens}; raise it or train fewer heads"
            )
            yield ("passes", index, Medusa.name, "heads"), message
