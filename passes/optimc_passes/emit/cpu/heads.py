"""Medusa heads as a second list of operations, on buffers of their own behind those of the model.

The heads of a row lie beside each other, [N, K * d], which is the same memory as [N * K, d]: so the first blocks of all
heads are one product, and so is the projection they share.

Letters: N rows, K heads, d hidden size, C features of a product, V' draft vocabulary, g groups of C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from optimc.errors import LoweringError
from optimc.plan.cpu_program import (
    Elementwise,
    ElementwiseStep,
    Embed,
    Linear,
    Op,
    PermuteFeatures,
    Quantize,
    RowsKind,
    View,
)
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.find_hidden import OutputHead
from optimc_passes.emit.cpu.quantize_activations import LARGEST_GROUP, activation_group
from optimc_passes.emit.cpu.stored import STORED_AS
from optimc_passes.emit.cpu.weights import FloatSource, IntSource, LinearSource, PermutationSource, VectorSource
from optimc_passes.emit.lowered import LoweringOptions
from optimc_passes.heads.heads import SHARED_PROJECTION, Heads, block_bias, block_weight, own_projection
from optimc_passes.weights import Dense, Quantized, Weight


@dataclass
class HeadsDraft(Draft):
    """The heads under construction. Weights of the model are named by their keys there."""

    inputs: list[View] = field(default_factory=list)
    """Where hidden states are copied to."""
    same_memory: dict[int, int] = field(default_factory=dict)
    """A buffer to the one whose bytes it is."""


def translate_heads(heads: Heads, model: Draft, head: OutputHead, options: LoweringOptions) -> HeadsDraft:
    """Return the heads' operations. `model` is the finished draft of the model, whose output head is `head`.

    Raises LoweringError for heads that do not fit the model.
    """
    hidden_size = head.hidden.width
    if heads.info.hidden_size != hidden_size:
        raise LoweringError(
            f"the heads read hidden states of {heads.info.hidden_size}, the model's output head reads {hidden_size}"
        )
    if heads.info.num_heads > options.max_step_tokens:
        raise LoweringError(
            f"{heads.info.num_heads} heads are evaluated in one step, and max_step_tokens is "
            f"{options.max_step_tokens}; raise it or take fewer heads"
        )
    return _Translation(heads, model, head, options).draft


class _Translation:
    def __init__(self, heads: Heads, model: Draft, head: OutputHead, options: LoweringOptions) -> None:
        self.draft = HeadsDraft()
        self._heads = heads
        self._model = model
        self._head = head
        self._options = options
        info = heads.info
        self._count, self._width = info.num_heads, info.hidden_size
        self._project(self._blocks())

    def _blocks(self) -> View:
        """Return what the projections multiply, [N, K * d]."""
        info, count, d = self._heads.info, self._count, self._width
        # The hidden states once for every head, so that one operation adds them to all; the embedding follows the last.
        given = self.draft.new_rows("heads.input", "tokens", count * d + (d if info.conditioned else 0))
        self.draft.inputs = [_columns(given, k * d, d) for k in range(count)]
        if info.conditioned:
            self._embed(_columns(given, count * d, d))
        x = _columns(given, 0, count * d)
        for block in range(info.num_blocks):
            pre = self.draft.new_rows(f"heads.blocks.{block}", "tokens", count * d)
            if block == 0:
                read = _columns(given, (count - 1) * d, given.width - (count - 1) * d)
                self._block(range(count), block, read, pre)
            else:
                for k in range(count):
                    self._block([k], block, _columns(x, k * d, d), _columns(pre, k * d, d))
            out = self.draft.new_rows(f"heads.blocks.{block}.out", "tokens", count * d)
            self.draft.ops.append(_add_silu(f"heads.blocks.{block}", x, pre, out))
            x = out
        return x

    def _block(self, heads: Sequence[int], block: int, x: View, out: View) -> None:
        name = f"heads/blocks.{block}" if len(heads) > 1 else f"heads/{heads[0]}.blocks.{block}"
        source = _joined(name, [self._heads.weights[block_weight(k, block)] for k in heads])
        biases = [self._dense(block_bias(k, block)) for k in heads]

        def joined() -> NDArray[np.float32]:
            return np.concatenate([bias.read().astype(np.float32) for bias in biases])

        shape = (sum(bias.shape[0] for bias in biases),)
        bias = VectorSource(Constant(f"{name}.bias", shape, np.dtype(np.float32), joined)).as_bias(source.order())
        self._product(name, self._entered(name, source), None, x, out, bias=self._add(f"{name}.bias", bias))

    def _project(self, x: View) -> None:
        info, count, d = self._heads.info, self._count, self._width
        vocab = info.draft_vocab_size
        answers = self._as_rows_of_heads(x, d)
        if info.projection == "own":
            logits = self.draft.new_rows("heads.logits", "tokens", count * vocab)
            for k in range(count):
                name = f"heads/{k}.projection"
                key = self._entered(name, _joined(name, [self._heads.weights[own_projection(k)]]))
                self._product(name, key, None, _columns(x, k * d, d), _columns(logits, k * vocab, vocab))
            self.draft.logits = self._as_rows_of_heads(logits, vocab)
            return
        logits = self.draft.new_rows("heads.logits", "logits", vocab)
        shared = self._heads.weights.get(SHARED_PROJECTION)
        if shared is None:
            self._product("heads/projection", self._head.weight, self._head.order, answers, logits)
        else:
            key = self._entered("heads/projection", _joined("heads/projection", [shared]))
            self._product("heads/projection", key, self._order(shared), answers, logits)
        self.draft.logits = logits

    def _as_rows_of_heads(self, x: View, width: int) -> View:
        """Return [N, K * width] as [N * K, width]."""
        rows = self.draft.new_rows(f"{self.draft.buffers[x.buffer].name}.rows", "logits", width)
        self.draft.same_memory[rows.buffer] = x.buffer
        return rows

    def _embed(self, out: View) -> None:
        place, embed = next((i, op) for i, op in enumerate(self._model.ops) if isinstance(op, Embed))
        permute = self._model.ops[place + 1]
        name = "heads.root"
        if not (isinstance(permute, PermuteFeatures) and permute.x == embed.out):
            self.draft.ops.append(Embed(name=name, table=embed.table, scale=1.0, out=out))
            return
        looked_up = self.draft.new_rows(name, "tokens", out.width)
        self.draft.ops += [
            Embed(name=name, table=embed.table, scale=1.0, out=looked_up),
            PermuteFeatures(name=name, x=looked_up, permutation=permute.permutation, out=out),
        ]

    def _product(self, name: str, key: str, order: str | None, x: View, out: View, *, bias: str | None = None) -> None:
        """Append a product with a weight of the heads or of the model whose features lie in `order`."""
        name = name.replace("/", ".", 1)
        source = self.draft.weights.get(key) or self._model.weights[key]
        rows: RowsKind = self.draft.rows_of(x)
        if isinstance(source, IntSource) and self._options.int8_activations is not False:
            quantized = self.draft.new_quantized(f"{name}.x", rows, x.width, source.stored_group, 1)
            self.draft.ops.append(Quantize(name=name, x=x, quantized=quantized, permutation=order))
            op: Op = Linear(name=name, quantized=quantized, weight=key, bias=bias, out=out)
        else:
            if order is not None:
                ordered = self.draft.new_rows(f"{name}.x", rows, x.width)
                self.draft.ops.append(PermuteFeatures(name=name, x=x, permutation=order, out=ordered))
                x = ordered
            op = Linear(name=name, x=x, weight=key, bias=bias, out=out)
        self.draft.ops.append(op)

    def _entered(self, name: str, source: LinearSource) -> str:
        """Add a linear weight, its groups as fine as its activations'; return its key."""
        if isinstance(source, IntSource) and self._options.int8_activations is not False:
            group = activation_group(name, source, self._options.activation_scales, LARGEST_GROUP)
            source = replace(source, stored_group=group)
        return self._add(name, source)

    def _order(self, weight: Weight) -> str | None:
        order = weight.permutation if isinstance(weight, Quantized) else None
        if order is None:
            return None
        constant = Constant("heads/order", order.shape, order.dtype, order.read)
        return self._add("heads/order", PermutationSource(constant))

    def _add(self, key: str, source: LinearSource | VectorSource | PermutationSource) -> str:
        assert key not in self.draft.weights, key
        self.draft.weights[key] = source
        return key

    def _dense(self, name: str) -> Dense:
        weight = self._heads.weights[name]
        assert isinstance(weight, Dense), name
        return weight


def _columns(view: View, first: int, width: int) -> View:
    return View(buffer=view.buffer, column=view.column + first, width=width)


def _add_silu(name: str, x: View, pre: View, out: View) -> Elementwise:
    """out = x + silu(pre)"""
    steps = (
        ElementwiseStep(op="rows", a=0),
        ElementwiseStep(op="rows", a=1),
        ElementwiseStep(op="silu", a=1),
        ElementwiseStep(op="add", a=0, b=2),
    )
    return Elementwise(name=name, steps=steps, inputs=(x, pre), out=out)


def _joined(name: str, weights: Sequence[Weight]) -> LinearSource:
    """Return weights [N, C] below each other as one. Raises LoweringError if they are stored in different ways."""
    dense = [weight for weight in weights if isinstance(weight, Dense)]
    if len(dense) == len(weights):
        dtype = dense[0].dtype if len({weight.dtype for weight in dense}) == 1 else np.dtype(np.float32)
        if dtype not in STORED_AS:
            dtype = np.dtype(np.float32)

        def read() -> NDArray[np.generic]:
            return np.concatenate([weight.read().astype(dtype, copy=False) for weight in dense]).T

        shape = (dense[0].shape[1], sum(weight.shape[0] for weight in dense))
        return FloatSource(Constant(name, shape, dtype, read))
    quantized = [weight for weight in weights if isinstance(weight, Quantized)]
    schemes = {(weight.bits, weight.group, weight.symmetric) for weight in quantized}
    if len(quantized) < len(weights) or len(schemes) > 1:
        raise LoweringError(f"{name}: its heads are rounded in different ways; give all of them one scheme")
    if len(quantized) > 1 and any(weight.permutation is not None for weight in quantized):
        raise LoweringError(f"{name}: features of its heads lie in an order of their own; round them without one")
    return _int_source(name, quantized)


def _int_source(name: str, weights: Sequence[Quantized]) -> IntSource:
    first = weights[0]
    features = first.shape[1]
    stored_bits = 4 if first.bits <= 4 else 8
    # Codes around 2**(bits - 1) are stored around the middle of what they are stored in.
    shift = np.uint8((1 << (stored_bits - 1)) - (1 << (first.bits - 1))) if first.symmetric else np.uint8(0)
    outputs = sum(weight.shape[0] for weight in weights)
    groups = first.scales.shape[1]

    def codes() -> NDArray[np.uint8]:
        return np.concatenate([weight.codes.read() + shift for weight in weights]).T

    def scales() -> NDArray[np.float32]:
        return np.concatenate([weight.scales.read().astype(np.float32) for weight in weights]).T

    def zeros() -> NDArray[np.uint8]:
        return np.concatenate([weight.zeros.read() for weight in weights if weight.zeros is not None]).T

    return IntSource(
        codes=Constant(f"{name}.codes", (features, outputs), np.dtype(np.uint8), codes),
        scales=Constant(f"{name}.scales", (groups, outputs), np.dtype(np.float32), scales),
        zeros=None if first.symmetric else Constant(f"{name}.zeros", (groups, outputs), np.dtype(np.uint8), zeros),
        bits=stored_bits,
        group=min(first.group, features),
        stored_group=min(first.group, features),
    )
