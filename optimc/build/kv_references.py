"""What a recipe's `kv_quant` asks of the rest of the recipe and of its target, looked at before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from optimc.errors import ConfigError, Fault
from optimc.recipe.load import Finding

if TYPE_CHECKING:
    from optimc.build.inputs import BuildInputs
    from optimc.plan import KvDtype, KvKeys
    from optimc_passes.emit import LoweringOptions, Target
    from optimc_passes.quantize.kv_quant import KvQuantConfig

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def kv_findings(data: Mapping[str, Any], target: Target, options: LoweringOptions) -> Iterator[Finding]:
    """Yield cache formats the target cannot hold with these options, formats asked for in two places or in none, and
    keys measured too early or on nothing.

    `data` is a parsed recipe; parts of a wrong shape are others' to report.
    """
    from optimc_passes.quantize.kv_quant import KvQuant, KvQuantConfig

    entries = data.get("passes")
    listed = entries if isinstance(entries, list) else []
    names = list(map(_name, listed))
    deciding = list(_deciding(listed))
    for index, dtypes in deciding:
        for dtype in dtypes:
            if (reason := target.refuse_kv(dtype, options)) is not None:
                yield ("passes", index, str(names[index]), "kv", "dtypes"), reason
    for index, config in _configs(listed, KvQuant.name, KvQuantConfig):
        for field, dtype in config.dtypes().items():
            if (reason := target.refuse_kv(dtype, options)) is not None:
                yield ("passes", index, KvQuant.name, field), reason
        if (reason := _refused_keys(config, target)) is not None:
            yield ("passes", index, KvQuant.name, "keys"), reason
        before = [place for place, _ in deciding if place < index]
        place = ("passes", index, KvQuant.name, "dtype")
        if config.dtype != "auto" and before:
            yield place, f"passes[{before[0]}] {names[before[0]]} chooses formats of the cache; set dtype: auto"
        elif config.dtype == "auto" and not before and not any(_is_users(name) for name in names[:index]):
            yield place, "no pass before this one chooses formats of the cache; put auto_bits with kv there"
        for behind in (place for place, _ in deciding if place > index):
            yield (
                ("passes", behind),
                f"{names[behind]} chooses formats of the cache; put it before {KvQuant.name}",
            )
        if not KvQuant(config).uses_calibration:
            continue
        if data.get("calibration") is None:
            yield (
                ("passes", index),
                (
                    f"{KvQuant.name} measures keys on calibration text; add a calibration section, keys: token, or "
                    "allow_uncalibrated: true"
                ),
            )
        later = [name for name in names[index + 1 :] if _changes_weights(name)]
        if later:
            yield (
                ("passes", index),
                f"{KvQuant.name} measures keys, and {later[0]} behind it changes the weights of keys; put it last",
            )
    places = [index for index, name in enumerate(names) if name == KvQuant.name]
    for index in places[1:]:
        yield ("passes", index), f"{KvQuant.name} is passes[{places[0]}] already; one decides for all layers"
    asked = data.get("target")
    beside = asked.get("kv_dtype") if isinstance(asked, dict) else None
    choosing = sorted({*places, *(index for index, _ in deciding)})
    if choosing and beside not in (None, "float32"):
        yield (
            ("target", "kv_dtype"),
            f"passes[{choosing[0]}] {names[choosing[0]]} chooses the cache's format; leave out one of the two",
        )


def check_kv(inputs: BuildInputs, model_config: Any, max_seq_len: int) -> None:
    """Raise ConfigError if `kv_quant` does not suit the model: layers it has not, or sequences longer than the scales
    of keys that are measured.
    """
    from optimc_passes.quantize.kv_quant import KvQuant

    calibration = inputs.recipe.calibration
    seen = 0 if calibration is None else calibration.seq_len
    faults = []
    for pass_ in inputs.passes:
        if not isinstance(pass_, KvQuant):
            continue
        if (problem := pass_.skipped_beyond(model_config)) is not None:
            faults.append(Fault(f"{KvQuant.name}.skip_layers", problem))
        reach = pass_.reach(model_config)
        if reach is not None and max(reach, seen) < max_seq_len:
            message = (
                f"scales of key channels suit {max(reach, seen)} positions, and sequences get {max_seq_len} long; set "
                f"positions: {max_seq_len}, keys: token, or a smaller limits.max_seq_len"
            )
            faults.append(Fault(f"{KvQuant.name}.positions", message))
    if faults:
        raise ConfigError(str(inputs.recipe_path), faults)


def _deciding(entries: Sequence[object]) -> Iterator[tuple[int, tuple[KvDtype, ...]]]:
    """Yield the place of each pass that chooses formats of the cache for `kv_quant`, and what it chooses from."""
    from optimc_passes.quantize.auto_bits import AutoBits, AutoBitsConfig

    for index, config in _configs(entries, AutoBits.name, AutoBitsConfig):
        if config.kv is not None:
            yield index, config.kv.dtypes


def _configs(entries: Sequence[object], name: str, config_type: type[ConfigT]) -> Iterator[tuple[int, ConfigT]]:
    """Yield the place and the options of every pass of a name, but for options that are wrong themselves."""
    for index, entry in enumerate(entries):
        if _name(entry) == name:
            options = entry[name] if isinstance(entry, dict) else None
            with suppress(ValidationError):
                yield index, config_type.model_validate(options or {})


def _refused_keys(config: KvQuantConfig, target: Target) -> str | None:
    """Return why the target cannot have the keys asked for; `auto` may come to either kind."""
    asked: KvKeys = "token" if config.keys == "token" or config.dtype == "fp8" else "channel"
    return target.refuse_keys(asked)


def _is_users(name: object) -> bool:
    """Whether a pass is one of the user's own, which may choose what it likes."""
    return isinstance(name, str) and ":" in name


def _changes_weights(name: object) -> bool:
    from optimc_passes.quantize.auto_bits import AutoBits
    from optimc_passes.quantize.kv_quant import KvQuant
    from optimc_passes.registry import PASSES

    known = isinstance(name, str) and name in PASSES and name not in (AutoBits.name, KvQuant.name)
    return known and PASSES[str(name)].stage == "weights"


def _name(entry: object) -> object:
    return next(iter(entry), None) if isinstance(entry, dict) else entry
