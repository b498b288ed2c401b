"""A transformers model without its weights: every parameter has its shape, none has memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from optimc_passes.frontend.attention import ATTENTION_NAME


def build_skeleton(config: Any) -> nn.Module:
    """Return the float32 model of `config` in evaluation mode; parameters read as zero and occupy one scalar each.

    Tied parameters stay one object. Buffers (rotary frequencies, embedding scales) hold their real values.
    Must be called while the attention function is registered. `config` is not changed.
    """
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    # Padding only matters to training; some checkpoints name a token beyond their own vocabulary.
    config.pad_token_id = None
    with parameters_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
        )
    model.tie_weights()  # type: ignore[operator]  # nn.Module declares no methods of its subclasses
    _fill_with_zeros(model)
    freeze_longrope(model)
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as a module registers it, before it is initialised."""

    def to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # None keeps what is there: a parameter on meta already may be shared, and must stay the same object.
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # None is allowed at run time
    try:
        yield
    finally:
        handle.remove()


def _fill_with_zeros(model: nn.Module) -> None:
    """Replace meta parameters, which an export cannot run on, by zeros of stride 0."""
    filled: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in filled:
                zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                filled[id(parameter)] = nn.Parameter(zeros, requires_grad=False)
            module._parameters[name] = filled[id(parameter)]


def freeze_longrope(model: nn.Module) -> None:
    """Keep the short factors for good: `check_supported` admits longrope only where no sequence can need the long."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type = "longrope, short factors"  # type: ignore[assignment]  # as above
