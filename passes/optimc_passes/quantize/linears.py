"""Which weights belong to linear layers, and which to the input embedding, read off the model's own structure."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LinearWeight:
    """The weight of one linear layer, [N, C]."""

    name: str
    """Parameter name, "model.layers.0.mlp.up_proj.weight"; a tied head's is its own, "lm_head.weight"."""
    shape: tuple[int, int]
    is_head: bool = False
    """Whether it is the output head."""
    tied_to: str | None = None
    """Parameter whose values it shares, under whose name the checkpoint has them."""
    is_embedding: bool = False
    """Whether it is the table of the input embedding [V, C]: a lookup is a product with a one-hot row."""

    @property
    def layer(self) -> str:
        """Module name: the parameter name without its last part."""
        return self.name.rpartition(".")[0]

    @property
    def source(self) -> str:
        """Name under which the checkpoint has the values."""
        return self.tied_to or self.name


def linear_weights(config: Any) -> tuple[LinearWeight, ...]:
    """List the linear layers of the transformers model of `config`, in the model's order, without loading weights."""
    import torch

    model = _without_memory(config)
    first_name: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(parameter), name)
    head = model.get_output_embeddings()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            own = f"{name}.weight"
            owner = first_name[id(module.weight)]
            tied_to = owner if owner != own else None
            shape = (module.out_features, module.in_features)
            found.append(LinearWeight(own, shape, is_head=module is head, tied_to=tied_to))
    return tuple(found)


def embedding_weight(config: Any) -> LinearWeight:
    """Return the table of the input embedding of the transformers model of `config`, without loading it."""
    model = _without_memory(config)
    embedding = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embedding)
    return LinearWeight(f"{name}.weight", tuple(embedding.weight.shape), is_embedding=True)


def _without_memory(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    model.tie_weights()
    return model
