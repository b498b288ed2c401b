"""What a recipe's `kv_quant` asks of the rest of the recipe and of its target, looked at before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from optimc.errors import ConfigError, Fault
from optimc.recipe import TargetSpec
from optimc.recipe.load import Finding

if TYPE_CHECKING:
    from optimc.build.inputs import BuildInputs
    from optimc_passes.emit import Target


def kv_findings(data: Mapping[str, Any], target: Target) -> Iterator[Finding]:
    """Yield cache formats the target cannot hold, formats asked for in two places, and keys measured too early.

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
        later = [name for name in map(_name, listed[index + 1 :]) if _changes_weights(name)]
        if KvQuant(config).uses_calibration and later:
            yield (
                ("passes", index),
                f"{KvQuant.name} measures keys, and {later[0]} behind it changes the weights of keys; put it last",
            )
    for index in places[1:]:
        yield ("passes", index), f"{KvQuant.name} is passes[{places[0]}] already; one decides for all layers"
    asked = data.get("target")
    beside = asked.get("kv_dtype") if isinstance(asked, dict) else None
    if places and beside not in (None, TargetSpec().kv_dtype):
        yield (
            ("target", "kv_dtype"),
            f"passes[{places[0]}] {KvQuant.name} chooses the cache's format; leave out one of the two",
        )


def check_reach(inputs: BuildInputs, model_config: Any, max_seq_len: int) -> None:
    """Raise ConfigError if sequences get longer than the scales of keys that `kv_quant` measures are made for."""
    from optimc_passes.quantize.kv_quant import KvQuant

    calibration = inputs.recipe.calibration
    seen = 0 if calibration is None else calibration.seq_len
    for pass_ in inputs.passes:
        reach = pass_.reach(model_config) if isinstance(pass_, KvQuant) else None
        if reach is not None and max(reach, seen) < max_seq_len:
            message = (
                f"scales of key channels suit {max(reach, seen)} positions, and sequences get {max_seq_len} long; set "
                f"positions: {max_seq_len}, keys: token, or a smaller limits.max_seq_len"
            )
            raise ConfigError(str(inputs.recipe_path), [Fault(f"{KvQuant.name}.positions", message)])


def _changes_weights(name: object) -> bool:
    from optimc_passes.quantize.auto_bits import AutoBits
    from optimc_passes.quantize.kv_quant import KvQuant
    from optimc_passes.registry import PASSES

    known = isinstance(name, str) and name in PASSES and name not in (AutoBits.name, KvQuant.name)
    return known and PASSES[str(name)].stage == "weights"


def _name(entry: object) -> object:
    return next(iter(entry), None) if isinstance(entry, dict) else entry
