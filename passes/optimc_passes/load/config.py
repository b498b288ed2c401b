"""config.json: from a file to a transformers configuration every key of which is understood, or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc.wording import one_line
from optimc_passes.load.config_audit import audit_config
from optimc_passes.load.json_file import read_json_object

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class LoadedConfig:
    """A checkpoint's configuration and the class it configures."""

    config: Any
    """transformers.PretrainedConfig. It has `auto_map` only if the checkpoint's own code is trusted and used."""
    raw: Mapping[str, Any]
    """The parsed config.json: what the file says, without the class's defaults."""
    model_class: type
    notes: tuple[str, ...] = ()


def read_config(folder: Path, *, trust_remote_code: bool) -> LoadedConfig:
    """Read and check `folder`'s config.json. No weights are looked at.

    A checkpoint that brings Python code is loaded with transformers' own class of the same model_type if there is one
    (the note says so); its code runs only if `trust_remote_code` is set.

    Raises CheckpointError if config.json is missing or invalid, UnsupportedModelError if it describes a model that
    transformers has no causal language model for, that is quantized already, or that has keys nothing reads.
    """
    path = folder / CONFIG_NAME
    raw = read_json_object(path)
    _refuse_quantized(raw, path)
    if trust_remote_code and raw.get("auto_map"):
        return _with_own_code(folder, raw)
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
    return LoadedConfig(_instantiate(config_class, described, path), raw, model_class, notes)


def _refuse_quantized(raw: Mapping[str, Any], path: Path) -> None:
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            facts = raw[key] if isinstance(raw[key], dict) else {}
            method = facts.get("quant_method") or facts.get("format") or "unnamed method"
            raise UnsupportedModelError(
                f"{path}: the checkpoint is quantized already ({method}), which cannot be read yet; "
                "start from the original weights and quantize in the recipe"
            )


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


def _with_own_code(folder: Path, raw: Mapping[str, Any]) -> LoadedConfig:
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
    return LoadedConfig(config, raw, model_class, (f"the checkpoint's own code was run: {reference}",))


def _instantiate(config_class: Any, raw: Mapping[str, Any], path: Path) -> Any:
    try:
        return config_class.from_dict(dict(raw))
    except Exception as error:  # the classes validate with whatever exception comes handy
        raise CheckpointError(f"{path}: not a valid {config_class.__name__}: {one_line(error)}") from error
