"""What a recipe's `kv_quant` asks of its target, looked at before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from optimc.recipe import TargetSpec
from optimc.recipe.load import Finding

if TYPE_CHECKING:
    from optimc_passes.emit import Target


def kv_findings(data: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Yield cache formats the target cannot hold, and formats asked for in two places.

    `data` is a parsed recipe; parts of a wrong shape are others' to report.
    """
    from optimc_passes.quantize.kv_quant import KvQuant, KvQuantConfig

    entries = data.get("passes")
    listed = entries if isinstance(entries, list) else []
    places = [index for index, entry in enumerate(listed) if _name(entry) == KvQuant.name]
    for index in places:
        options = listed[index][KvQuant.name] if isinstance(listed[index], dict) else None
        try:
            config = KvQuantConfig.model_validate(options or {})
        except ValidationError:
            continue
        for field, dtype in config.dtypes().items():
            if (reason := target.refuse_kv(dtype)) is not None:
                yield ("passes", index, KvQuant.name, field), reason
    for index in places[1:]:
        yield ("passes", index), f"{KvQuant.name} is passes[{places[0]}] already; one decides for all layers"
    asked = data.get("target")
    beside = asked.get("kv_dtype") if isinstance(asked, dict) else None
    if places and beside not in (None, TargetSpec().kv_dtype):
        yield (
            ("target", "kv_dtype"),
            f"passes[{places[0]}] {KvQuant.name} chooses the cache's format; leave out one of the two",
        )


def _name(entry: object) -> object:
    return next(iter(entry), None) if isinstance(entry, dict) else entry
