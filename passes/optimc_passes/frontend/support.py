"""Can this model be compiled? Answered from its configuration alone, before anything slow happens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optimc.errors import UnsupportedModelError
from optimc_passes.frontend.architectures import TESTED, TESTED_LAYERS, TESTED_ROPE

_FOREIGN_FEATURES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("is_encoder_decoder",), "an encoder beside the decoder"),
    (("add_cross_attention",), "cross attention"),
    (("vision_config", "audio_config"), "image or audio input"),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), "mixture-of-experts layers"),
    (("attention_chunk_size",), "chunked attention"),
    (("kv_lora_rank",), "latent attention, whose query and value heads differ in size"),
    (
        ("state_size", "mamba_d_state", "ssm_state_size", "lru_width", "linear_num_key_heads", "attention_hidden_size"),
        "recurrent layers, whose state is not a KV cache",
    ),
    (("alibi", "use_alibi"), "ALiBi position biases"),
    (("use_bidirectional_attention",), "attention that is not causal"),
)
"""Configuration keys that, set to anything but null, false or 0, mean something the dialect cannot express."""


def check_supported(config: Any, *, max_seq_len: int | None = None, allow_untested: bool = False) -> None:
    """Refuse what optimc cannot compile, naming everything that is missing. Takes milliseconds, touches no weights.

    `config` is a transformers config. `max_seq_len`, when known, decides whether a length-dependent RoPE is fixed.
    An architecture outside the tested table is refused unless `allow_untested`; then whatever the attention interface
    can express is attempted, and nothing vouches for the result. Raises UnsupportedModelError.
    """
    faults = [*_foreign_features(config), *_layer_types(config), *_rope(config, max_seq_len)]
    tested = config.model_type in TESTED
    if type(config).__module__.split(".")[0] == "transformers_modules":
        faults.append("it is defined by the checkpoint's own code, and optimc exports transformers' classes only")
        tested = False
    elif allow_untested and not tested and not faults:
        faults += _attention_interface(config)
    declared = [name for name in getattr(config, "architectures", None) or [] if not name.endswith("ForCausalLM")]
    if declared:
        faults.append(f"{declared[0]} is not a causal language model")
    if not tested and not allow_untested:
        hint = "" if faults else "; allow_untested: true beside the model's source tries it all the same"
        faults.append(f"it is not a tested architecture; supported are {', '.join(sorted(TESTED.values()))}{hint}")
    if faults:
        raise UnsupportedModelError(f"{architecture(config)}: {'; '.join(faults)}")


def architecture(config: Any) -> str:
    """Return the name users know the model by: its class in the checkpoint, else the tested class, else the type."""
    declared = getattr(config, "architectures", None)
    return str(declared[0]) if declared else TESTED.get(config.model_type, f"model type '{config.model_type}'")


def _foreign_features(config: Any) -> Iterator[str]:
    for keys, feature in _FOREIGN_FEATURES:
        for key in keys:
            value = getattr(config, key, None)
            if value:
                shown = f" = {value}" if isinstance(value, int) and not isinstance(value, bool) else ""
                yield f"it has {feature} ({key}{shown})"
                break


def _layer_types(config: Any) -> Iterator[str]:
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    unknown = sorted({str(layer) for layer in layers} - TESTED_LAYERS)
    if unknown:
        yield f"it has layers of type {', '.join(unknown)}; only {' and '.join(sorted(TESTED_LAYERS))} can be compiled"


def _rope(config: Any, max_seq_len: int | None) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    for rope in nested or [parameters]:
        kind = rope.get("rope_type", "default")
        if kind == "dynamic":
            yield "its RoPE ('dynamic') changes all frequencies as a sequence grows, so cached keys would go stale"
        elif kind not in TESTED_ROPE:
            yield f"its RoPE has type '{kind}'; tested are {', '.join(sorted(TESTED_ROPE))}"
        elif kind == "longrope" and max_seq_len is not None:
            original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            if max_seq_len > original:
                yield (
                    f"its RoPE ('longrope') switches to other frequencies past {original} tokens, so cached keys would "
                    f"go stale; max_seq_len is {max_seq_len}, set it to at most {original}"
                )


def _attention_interface(config: Any) -> Iterator[str]:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "transformers has no causal language model for it"
    elif not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        yield "its transformers code does not go through the attention interface"
