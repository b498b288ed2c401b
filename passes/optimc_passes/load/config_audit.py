"""Is every key of config.json understood? A key that is dropped without a word is a model that is wrong without a word.

A key is used, irrelevant, neutral (null, false, empty), or the checkpoint is refused.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from optimc.errors import UnsupportedModelError

# fmt: off
IRRELEVANT = frozenset({
    "architectures", "attn_implementation", "auto_map", "begin_suppress_tokens", "bos_token", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id",
    "dtype", "embd_pdrop", "eos_token", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "flash_attn", "hidden_dropout", "initializer_range", "is_decoder", "is_llama_config",
    "keys_to_ignore_at_inference", "max_length", "mlp_dropout", "model_max_length", "model_type", "name_or_path",
    "neftune_noise_alpha", "num_labels", "output_attentions", "output_hidden_states", "output_scores", "pad_token",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    "use_flash_attention_2", "use_flash_attn",
})
# fmt: on
"""Keys that say how to train, store, generate or integrate, not what the network computes."""

# fmt: off
ROPE_KEYS = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor", "long_factor",
    "long_mscale", "low_freq_factor", "mscale", "mscale_all_dim", "original_max_position_embeddings",
    "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "short_mscale", "truncate", "type",
})
# fmt: on
"""What a RoPE description may hold, whatever its kind."""


def audit_config(raw: Mapping[str, Any], config_class: type, model_class: type, where: str) -> None:
    """Check every key of `raw`, the parsed config.json, against what the model's classes read.

    Raises UnsupportedModelError naming all keys that nothing reads.
    """
    unread = [key for key, value in raw.items() if not _is_understood(key, value, config_class, model_class)]
    unread += [f"{key}.{inner}" for key, inner in _unknown_rope_keys(raw)]
    if unread:
        listed = ", ".join(f"{key} ({_shown(raw.get(key))})" if key in raw else key for key in sorted(unread))
        raise UnsupportedModelError(
            f"{where}: {config_class.__name__} does not read {listed}, so the model would not compute what its "
            "configuration says; remove a key only if the weights do not depend on it"
        )


def is_neutral(value: object) -> bool:
    """Whether a value asks for nothing: null, false, empty."""
    return value is None or value is False or value in ("", [], {})


def _is_understood(key: str, value: object, config_class: type, model_class: type) -> bool:
    if is_neutral(value) or key in IRRELEVANT or key in _declared(config_class) or key in _generation_keys():
        return True
    if key.startswith("_"):
        return True  # transformers' own bookkeeping, not a setting
    if key in ("rope_scaling", "rope_theta", "partial_rotary_factor"):
        # Older spellings, which the base class folds into rope_parameters where the family has them.
        return "rope_parameters" in _declared(config_class)
    return any(_config_code_reads(m, key) for m in _modules(config_class)) or any(
        _model_code_reads(m, key) for m in _modules(model_class)
    )


def _declared(config_class: type) -> set[str]:
    fields = set(getattr(config_class, "__dataclass_fields__", ()))
    # A checkpoint's own config class declares its keys as arguments.
    arguments = set(inspect.signature(config_class).parameters) - {"args", "kwargs"}
    return fields | arguments | set(getattr(config_class, "attribute_map", {}))


def _generation_keys() -> set[str]:
    from transformers import GenerationConfig

    # Old checkpoints keep sampling settings here; generation_config.json is where they are read from.
    return {key for key in GenerationConfig().to_dict() if not key.startswith("_")}


def _modules(cls: type) -> list[ModuleType]:
    """Return the modules that define `cls` and those of its bases that belong to a model family."""
    names = {base.__module__ for base in cls.__mro__}
    return [sys.modules[name] for name in sorted(names) if ".models." in name or "transformers_modules" in name]


def _config_code_reads(module: ModuleType, key: str) -> bool:
    quoted = rf"""["']{re.escape(key)}["']"""
    return re.search(rf"kwargs(?:\.(?:get|pop|setdefault)\(|\[)\s*{quoted}", inspect.getsource(module)) is not None


def _model_code_reads(module: ModuleType, key: str) -> bool:
    if not key.isidentifier():
        return False
    pattern = rf"""config\.{key}\b|getattr\(\s*(?:self\.)?config\s*,\s*["']{key}["']"""
    return re.search(pattern, inspect.getsource(module)) is not None


def _unknown_rope_keys(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (key, nested key) of RoPE settings no kind of RoPE has."""
    unknown = []
    for key in ("rope_scaling", "rope_parameters"):
        description = raw.get(key)
        if not isinstance(description, dict):
            continue
        for name, value in description.items():
            # Families with several kinds of layers describe RoPE once per kind.
            nested = value.items() if isinstance(value, dict) else [(name, value)]
            unknown += [(key, inner) for inner, v in nested if inner not in ROPE_KEYS and not is_neutral(v)]
    return unknown


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
