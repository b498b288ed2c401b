"""How transformers' attention becomes one `optimc::PagedAttention` node per layer.

transformers calls an attention function it looks up by name, with q, k, v after RoPE and the layer's own numbers as
keyword arguments, and a mask function that builds the mask beforehand. Both are replaced for the time of an export:
masks carry only their window, and attention emits the dialect's node or refuses what the node cannot mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from optimc.errors import UnsupportedModelError
from optimc_passes.dialect.paged_attention import DOMAIN, DOMAIN_VERSION, OP_TYPE

ATTENTION_NAME = "optimc_paged"
"""The name under which both functions are registered; it stands in the config as `_attn_implementation`."""

_EXPRESSED = {"scaling", "sliding_window", "softcap", "is_causal"}
_IRRELEVANT = {
    "cache",
    "cache_position",
    "dropout",  # the model is in evaluation mode
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",  # applied to q and k already
    "position_ids",
    "return_dict",
    "use_cache",
}
"""Keyword arguments that reach the attention function but cannot change what it computes."""


@contextmanager
def paged_attention_registered() -> Iterator[None]:
    """Register the attention and mask functions under `ATTENTION_NAME`; put everything back at the end."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _emit_paged_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _describe_mask)
    try:
        yield
    finally:
        # Through the backing dicts: the interface objects delete from a local copy only.
        type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(ATTENTION_NAME)
        type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping.pop(ATTENTION_NAME)


def _describe_mask(
    *_: Any, device: torch.device, local_size: int | None = None, use_vmap: bool = False, **others: Any
) -> torch.Tensor:
    """Return a tensor that stands for the mask; only its attribute is read, so it leaves no trace in the graph.

    The window a mask was made with is what an eager model obeys; the `sliding_window` argument is only a copy of it.
    """
    marker = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
    # transformers asks for vmap when the model adds a mask function of its own; the other flag belongs to masks that
    # are not causal.
    if not use_vmap and "allow_is_bidirectional_skip" not in others:
        marker.optimc_window = local_size or 0  # type: ignore[attr-defined]  # a tensor takes any attribute
    return marker


def _emit_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Emit PagedAttention for query [1, H, T, D], key and value [1, Hkv, T, D]; return [1, T, H, D].

    Raises UnsupportedModelError naming what the node cannot express.
    """
    layer = getattr(module, "layer_idx", None)
    where = f"{type(module).__name__} of layer {layer}"
    refused = sorted(
        name for name, given in arguments.items() if given is not None and name not in _EXPRESSED | _IRRELEVANT
    )
    if refused:
        raise UnsupportedModelError(f"{where}: attention uses {', '.join(refused)}, which optimc cannot express")
    if layer is None:
        raise UnsupportedModelError(f"{where}: the attention module does not know its layer index")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{where}: attention is not causal")
    if query.shape[2] is not key.shape[2] and query.shape[2] != key.shape[2]:
        raise UnsupportedModelError(f"{where}: queries and keys come from different sequences (cross attention)")
    _, num_heads, _, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if not head_dim == key.shape[3] == value.shape[3]:
        raise UnsupportedModelError(
            f"{where}: query, key and value heads have {head_dim}, {key.shape[3]} and {value.shape[3]} channels; "
            "optimc needs them equal"
        )
    scaling = arguments.get("scaling")
    q, k, v = (x.transpose(1, 2).reshape(-1, x.shape[1] * x.shape[3]) for x in (query, key, value))
    out = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OP_TYPE}",
        (q, k, v),
        attrs={
            "layer": int(layer),
            "num_heads": int(num_heads),
            "num_kv_heads": int(num_kv_heads),
            "head_dim": int(head_dim),
            "scale": 1 / math.sqrt(head_dim) if scaling is None else float(scaling),
            "window": _window(where, arguments.get("sliding_window"), attention_mask),
            "softcap": float(arguments.get("softcap") or 0.0),
        },
        dtype=q.dtype,
        shape=q.shape,
        version=DOMAIN_VERSION,
    )
    return out.reshape(1, -1, num_heads, head_dim), None


def _window(where: str, argument: int | None, attention_mask: torch.Tensor | None) -> int:
    """Return the layer's window in tokens, 0 for none, and insist that mask and argument agree on it."""
    window = int(argument or 0)
    if attention_mask is None:
        return window
    masked = getattr(attention_mask, "optimc_window", None)
    if masked is None:
        raise UnsupportedModelError(f"{where}: the attention mask is neither causal nor a causal window")
    if masked != window:
        raise UnsupportedModelError(
            f"{where}: the mask has a window of {masked} tokens, the attention call says {window}; optimc cannot tell "
            "which is meant"
        )
    return window
