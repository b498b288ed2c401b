"""config.json: from a file to a transformers configuration every key of which is understood, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc.wording import one_line
from optimc_passes.formats.read import QUANTIZATION_KEYS, quantization_facts, read_quantization
from optimc_passes.formats.scheme import QuantScheme
from optimc_passes.load.config_audit import audit_config
from optimc_passes.load.json_file import read_json_object, read_optional_json_object

CONFIG_NAME = "config.json"
QUANTIZE_NAME = "quantize_config.json"
"""Where older GPTQ checkpoints describe their weights."""


@dataclass(frozen=True)
class LoadedConfig:
    """A checkpoint's configuration and the class it configures."""

    config: Any
    """transformers.PretrainedConfig. It has `auto_map` only if the checkpoint's own code is trusted and used, and never
    a `quantization_config`: what is built from it are plain layers."""
    raw: Mapping[str, Any]
    """The parsed config.json: what the file says, without the class's defaults and without `quantization_config`."""
    model_class: type
    notes: tuple[str, ...] = ()
    quantization: QuantScheme | None = None
    """How weights are stored, if not plainly."""


def read_config(folder: Path, *, trust_remote_code: bool) -> LoadedConfig:
    """Read and check `folder`'s config.json. No weights are looked at.

    A checkpoint that brings Python code is loaded with transformers' own class of the same model_type if there is one
    (the note says so); its code runs only if `trust_remote_code` is set.

    Raises CheckpointError if config.json is missing or invalid, UnsupportedModelError if it describes a model that
    transformers has no causal language model for, that is quantized in a way nothing reads, or that has such keys.
    """
    path = folder / CONFIG_NAME
    raw = read_json_object(path)
    quantization = _read_quantization(raw, folder)
    raw = {key: value for key, value in raw.items() if key not in QUANTIZATION_KEYS}
    if trust_remote_code and raw.get("auto_map"):
        return _with_own_code(folder, raw, quantization)
    model_type = raw.get("model_type")
    if not model_type:
        raise UnsupportedModelError(f"{path}: no model_type, so there is no telling which architecture this is")
    config_class, model_class = _find_classes(str(model_type), raw, path)
    _check_architecture(raw, model_class, path)
    audit_config(raw, config_class, model_class, str(path))
    notes: tuple[str, ...] = ()
    if raw.get("auto_map"):
        notes = (f"the checkpoint's own code was not run; transformers' {model_class.__name__} was used",)
    described = {key: value for key, value in raw.items() if key != "auto_map"}
    return LoadedConfig(_instantiate(config_class, described, path), raw, model_class, notes, quantization)


def _read_quantization(raw: Mapping[str, Any], folder: Path) -> QuantScheme | None:
    """Return how weights are stored. Raises CheckpointError if two files say different things about it."""
    path, older = folder / CONFIG_NAME, folder / QUANTIZE_NAME
    facts = quantization_facts(raw)
    beside = read_optional_json_object(older)
    if facts is None:
        return read_quantization({"quant_method": "gptq", **beside}, str(older)) if beside else None
    if isinstance(facts, dict):
        for key in ("bits", "group_size", "sym", "desc_act", "checkpoint_format"):
            if key in facts and key in beside and facts[key] != beside[key]:
                raise CheckpointError(
                    f"{folder}: {key} is {facts[key]!r} in {CONFIG_NAME} and {beside[key]!r} in {QUANTIZE_NAME}"
                )
    return read_quantization(facts, str(path))


def _find_classes(model_type: str, raw: Mapping[str, Any], path: Path) -> tuple[type, type]:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, __version__

    if model_type not in CONFIG_MAPPING:
        hint = "unknown to transformers " + __version__
        if raw.get("auto_map"):
            hint += "; the checkpoint's own Python code defines it, and optimc exports transformers' classes only"
        raise UnsupportedModelError(f"{path}: model_type '{model_type}' is {hint}")
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"{path}: model_type '{model_type}' has no causal language model in transformers")
    return config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def _check_architecture(raw: Mapping[str, Any], model_class: type, path: Path) -> None:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path}: architectures must be a list of class names, got {names!r}")
    if names and not any(name == model_class.__name__ or name.endswith("ForCausalLM") for name in names):
        raise UnsupportedModelError(
            f"{path}: the weights are those of a {', '.join(map(str, names))}, not of a causal language model"
        )


def _with_own_code(folder: Path, raw: Mapping[str, Any], quantization: QuantScheme | None) -> LoadedConfig:
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    path = folder / CONFIG_NAME
    reference = raw["auto_map"].get("AutoModelForCausalLM")
    if reference is None:
        raise UnsupportedModelError(f"{path}: the checkpoint's own code has no AutoModelForCausalLM in auto_map")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model_class = get_class_from_dynamic_module(reference, folder)
    except Exception as error:  # somebody else's code: anything can come out of it
        raise CheckpointError(f"{path}: the checkpoint's own code failed: {one_line(error)}") from error
    audit_config(raw, type(config), model_class, str(path))
    for key in QUANTIZATION_KEYS:
        if hasattr(config, key):
            delattr(config, key)
    notes = (f"the checkpoint's own code was run: {reference}",)
    return LoadedConfig(config, raw, model_class, notes, quantization)


def _instantiate(config_class: Any, raw: Mapping[str, Any], path: Path) -> Any:
    try:
        return config_class.from_dict(dict(raw))
    except Exception as error:  # the classes validate with whatever exception comes handy
        raise CheckpointError(f"{path}: not a valid {config_class.__name__}: {one_line(error)}") from error
