"""Where a decoder layer lets channel scales pass: what stands before a linear layer takes them, and nothing changes.

    y = W x = (W diag(s)) (diag(1/s) x)

diag(1/s) becomes part of whatever computes x, if that is linear in each channel of x:

    pre-norm            -> q, k, v or qkv_proj        the norm's weight over s
    pre-norm            -> gate, up or gate_up_proj   the norm's weight over s
    v rows              -> o_proj                     attention mixes tokens only; query heads share v's rows
    up rows             -> down_proj                  act(gate) * up is linear in up

Letters: N output features, C input features, P channels of the producer (P < C where query heads share values), D head
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import nn

    from optimc_passes.walk.loaded_layer import LoadedLayer

TOLERANCE = 1e-4
"""Largest change of a layer's output by a fold, relative to its largest element: float32 rounding stays far below."""

Parameter = Callable[[str], NDArray[np.float32]]
"""Full name to the parameter's values."""


@dataclass(frozen=True)
class NormProducer:
    """A norm that multiplies its result by offset + weight."""

    weight: str
    bias: str | None
    offset: float


@dataclass(frozen=True)
class RowsProducer:
    """Rows [first, first + count) of a linear layer's weight, and the same elements of its bias."""

    weight: str
    bias: str | None
    first: int
    count: int


@dataclass(frozen=True)
class FoldPair:
    """Linear layers that read one value, and what computes that value."""

    stage: str
    """Name of the `Stage` of the consumers: attention_in, attention_out, mlp_in or mlp_out."""
    producer: NormProducer | RowsProducer
    consumers: tuple[str, ...]
    """Weights [N, C]."""
    channels: NDArray[np.intp]
    """[C]: the producer's channel that each input feature comes from."""

    @property
    def weights(self) -> tuple[str, ...]:
        """Every weight a fold changes; biases follow their weight."""
        return (self.producer.weight, *self.consumers)


def fold_pairs(layer: nn.Module, prefix: str) -> tuple[FoldPair, ...]:
    """Return what a decoder layer of transformers can fold; its parameters' full names start with `prefix`.

    A layer has `self_attn` with `o_proj` and `mlp` with `down_proj`. A norm that is not where these families have a
    pre-norm is not looked for: then there is no pair.
    """
    from torch import nn

    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    heads = [f"{prefix}self_attn.{name}" for name in _linears(attention, "o_proj")]
    halves = [f"{prefix}mlp.{name}" for name in _linears(mlp, "down_proj")]
    o_proj, down_proj = attention.get_submodule("o_proj"), mlp.get_submodule("down_proj")
    assert isinstance(o_proj, nn.Linear)
    assert isinstance(down_proj, nn.Linear)
    pairs = []
    for stage, name, consumers in (
        ("attention_in", _attention_norm(layer), heads),
        ("mlp_in", _mlp_norm(layer), halves),
    ):
        if name is not None:
            norm = layer.get_submodule(name)
            width = norm.get_parameter("weight").shape[0]
            bias = f"{prefix}{name}.bias" if getattr(norm, "bias", None) is not None else None
            producer = NormProducer(f"{prefix}{name}.weight", bias, _offset(norm, width))
            names = tuple(f"{consumer}.weight" for consumer in consumers)
            pairs.append(FoldPair(stage, producer, names, np.arange(width)))
    values = _values(attention, f"{prefix}self_attn.", o_proj.in_features)
    if values is not None:
        head_dim = int(attention.head_dim)  # type: ignore[arg-type]  # nn.Module declares no attributes
        channels = _shared(o_proj.in_features, values.count, head_dim)
        pairs.append(FoldPair("attention_out", values, (f"{prefix}self_attn.o_proj.weight",), channels))
    up = _rows(mlp, f"{prefix}mlp.", "up_proj", "gate_up_proj", down_proj.in_features)
    if up is not None:
        channels = np.arange(down_proj.in_features)
        pairs.append(FoldPair("mlp_out", up, (f"{prefix}mlp.down_proj.weight",), channels))
    order = ("attention_in", "attention_out", "mlp_in", "mlp_out")
    return tuple(sorted(pairs, key=lambda pair: order.index(pair.stage)))


def fold(pair: FoldPair, scales: NDArray[np.float32], parameter: Parameter) -> dict[str, NDArray[np.float32]]:
    """Return the parameters that change, float32, when the consumers' columns are multiplied by `scales` [C].

    Input features of one channel must have one scale.
    """
    own: NDArray[np.float32] = np.ones(pair.channels.max() + 1, np.float32)
    own[pair.channels] = scales
    assert np.array_equal(own[pair.channels], scales), "features of one channel have different scales"
    producer = pair.producer
    changed: dict[str, NDArray[np.float32]] = {}
    if isinstance(producer, NormProducer):
        offset = np.float32(producer.offset)
        folded = (offset + parameter(producer.weight)) / own - offset
        changed[producer.weight] = folded.astype(np.float32, copy=False)
        if producer.bias is not None:
            changed[producer.bias] = (parameter(producer.bias) / own).astype(np.float32, copy=False)
    else:
        rows = slice(producer.first, producer.first + producer.count)
        weight = np.array(parameter(producer.weight), np.float32)
        weight[rows] /= own[:, None]
        changed[producer.weight] = weight
        if producer.bias is not None:
            bias = np.array(parameter(producer.bias), np.float32)
            bias[rows] /= own
            changed[producer.bias] = bias
    for consumer in pair.consumers:
        changed[consumer] = changed.get(consumer, parameter(consumer)) * scales
    return changed


def apply_folds(
    layer: LoadedLayer, folds: Sequence[tuple[FoldPair, NDArray[np.float32]]], tokens: int
) -> tuple[tuple[str, ...], tuple[FoldPair, ...]]:
    """Fold scales into a layer's weights, one pair after the other, each checked by running the layer.

    Return the names of the parameters that changed, and the pairs that were undone because the layer then computed
    something else. The check runs on random numbers [tokens, hidden]: the two must be one function.
    """
    if not folds:
        return (), ()
    hidden = _hidden(layer)
    probe = np.random.default_rng(layer.index).standard_normal((tokens, hidden)).astype(np.float32)
    before = layer.run(probe)
    changed: dict[str, None] = {}
    undone = []
    for pair, scales in folds:
        new = fold(pair, scales, layer.weight)
        old = {name: np.array(layer.weight(name)) for name in new}
        _set(layer, new)
        if np.abs(layer.run(probe) - before).max() > TOLERANCE * np.abs(before).max():
            _set(layer, old)
            undone.append(pair)
        else:
            changed.update(dict.fromkeys(new))
    return tuple(changed), tuple(undone)


def _set(layer: LoadedLayer, values: Mapping[str, NDArray[np.float32]]) -> None:
    for name, value in values.items():
        layer.set_weight(name, value)


def _hidden(layer: LoadedLayer) -> int:
    return int(layer.module.get_submodule("self_attn.o_proj").get_parameter("weight").shape[0])


def _linears(module: nn.Module, last: str) -> list[str]:
    """Return the linear layers of a module but the one it ends with."""
    from torch import nn

    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear) and name != last]


def _attention_norm(layer: nn.Module) -> str | None:
    return "input_layernorm" if hasattr(layer, "input_layernorm") else None


def _mlp_norm(layer: nn.Module) -> str | None:
    if hasattr(layer, "pre_feedforward_layernorm"):
        return "pre_feedforward_layernorm"
    # Where the MLP has a norm behind it and none before it, the one after attention is attention's own.
    own = hasattr(layer, "post_feedforward_layernorm")
    return "post_attention_layernorm" if hasattr(layer, "post_attention_layernorm") and not own else None


def _offset(norm: nn.Module, width: int) -> float:
    """Return 1 for a norm that multiplies by 1 + weight, 0 for one that multiplies by its weight."""
    import torch

    with torch.no_grad():
        given = torch.linspace(-1, 1, width)[None, None]
        zeros = {name: torch.zeros_like(value) for name, value in norm.named_parameters()}
        out = torch.func.functional_call(norm, zeros, (given,))
    return 1.0 if bool(out.abs().max() > 0) else 0.0


def _values(attention: nn.Module, prefix: str, features: int) -> RowsProducer | None:
    """Return the rows that compute v."""
    packed = getattr(attention, "qkv_proj", None)
    if packed is None:
        return _rows(attention, prefix, "v_proj", None, None)
    count = (packed.out_features - features) // 2
    return _slice(packed, f"{prefix}qkv_proj", packed.out_features - count, count)


def _rows(module: nn.Module, prefix: str, name: str, packed: str | None, count: int | None) -> RowsProducer | None:
    """Return all rows of a linear layer, or the last `count` of the one it is packed into."""
    whole = getattr(module, name, None)
    if whole is not None:
        return _slice(whole, f"{prefix}{name}", 0, whole.out_features)
    both = getattr(module, packed, None) if packed is not None else None
    if both is None or count is None:
        return None
    return _slice(both, f"{prefix}{packed}", both.out_features - count, count)


def _slice(linear: nn.Linear, name: str, first: int, count: int) -> RowsProducer:
    return RowsProducer(f"{name}.weight", None if linear.bias is None else f"{name}.bias", first, count)


def _shared(features: int, values: int, head_dim: int) -> NDArray[np.intp]:
    """Return the channel of v [Hkv D] that each feature of attention's output [H D] is a mean of."""
    feature = np.arange(features)
    head, place = feature // head_dim, feature % head_dim
    return head // (features // values) * head_dim + place
