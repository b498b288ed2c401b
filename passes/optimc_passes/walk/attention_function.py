"""The attention function of a walk: scaled dot products, and a hook that sees q, k and v after RoPE."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

WALK_ATTENTION = "optimc_walk"
"""The name under which the function is registered while a walked model runs."""

AttentionHook = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Layer, then q [1, H, T, D] and k, v [1, Hkv, T, D] after RoPE, float32; what it returns replaces k and v."""


@contextmanager
def walk_attention(hook: AttentionHook | None, *, softcap: bool) -> Iterator[None]:
    """Register attention and mask functions; put back what was there at the end, so that walks may be nested.

    With `softcap` masks are added to scores that were capped, which fused attention cannot do.
    """

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
    ) -> tuple[Tensor, None]:
        if hook is not None:
            replaced = hook(int(module.layer_idx), query, key, value)  # type: ignore[arg-type]  # a plain int there
            if replaced is not None:
                key, value = replaced
        cap = arguments.pop("softcap", None)
        if cap:
            return _capped(query, key, value, attention_mask, float(cap), arguments.get("scaling")), None
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
        return out, None

    functions = type(ALL_ATTENTION_FUNCTIONS)._global_mapping
    masks = type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping
    before = functions.get(WALK_ATTENTION), masks.get(WALK_ATTENTION)
    functions[WALK_ATTENTION] = attend
    masks[WALK_ATTENTION] = eager_mask if softcap else sdpa_mask
    try:
        yield
    finally:
        for mapping, previous in zip((functions, masks), before, strict=True):
            if previous is None:
                del mapping[WALK_ATTENTION]
            else:
                mapping[WALK_ATTENTION] = previous


def _capped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float, scaling: float | None
) -> Tensor:
    """Return attention [1, T, H, D] over scores cap * tanh(score / cap)."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / cap)) * cap
    assert mask is not None, "a mask that is added is never left out"
    return (torch.softmax(scores + mask, dim=-1) @ value).transpose(1, 2).contiguous()
