"""From a plan's program section to a native program: weights are views of the mapped file, operations are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimc.errors import PlanCorruptError, PlanTargetError
from optimc.plan import KvLayout, Plan
from optimc.plan.cpu_program import (
    Attention,
    CpuHeads,
    CpuProgram,
    Elementwise,
    Embed,
    FloatBuffer,
    FloatWeight,
    GatherRows,
    IntWeight,
    Linear,
    Norm,
    Op,
    Permutation,
    PermuteFeatures,
    Quantize,
    Rotation,
    Table,
    Vector,
    View,
    Weight,
)
from optimc_runtime import _native


def assemble(
    plan: Plan, program: CpuProgram, *, num_blocks: int, threads: int, instruction_set: str
) -> _native.Program:
    """Return the program ready to run.

    Raises PlanCorruptError naming the weight or operation that does not fit, PlanTargetError if the system does not
    start that many threads.
    """
    kv = plan.manifest.kv
    with _Blame(plan, "its KV cache and arena"):
        builder = _native.ProgramBuilder(
            layers=kv_layers(kv),
            block_size=kv.block_size,
            num_blocks=num_blocks,
            capacity=program.max_tokens,
            arena_bytes=program.arena_bytes,
        )
    for index, layer in enumerate(kv.layers):
        if layer.key_scales is not None:
            with _Blame(plan, f"key scales of KV layer {index}"):
                minimums = None if layer.key_minimums is None else plan.tensor(layer.key_minimums)
                builder.kv_channel_scales(index, plan.tensor(layer.key_scales), minimums)
    weights: dict[str, int] = {}
    for name, weight in program.weights.items():
        with _Blame(plan, f"weight '{name}'"):
            weights[name] = _add_weight(builder, plan, weight)
    for buffer in program.buffers:
        with _Blame(plan, f"buffer '{buffer.name}'"):
            if isinstance(buffer, FloatBuffer):
                builder.float_buffer(buffer.rows, buffer.width, buffer.offset)
            else:
                builder.quantized_buffer(buffer.rows, buffer.features, buffer.group, buffer.terms, buffer.offset)
    for op in program.ops:
        with _Blame(plan, f"operation '{op.name}'"):
            _add_op(builder, op, weights)
    if program.heads is not None:
        _add_heads(builder, plan, program.heads, program, weights)
    with _Blame(plan, "its logits"):
        width = _logits_width(program, program.logits)
        if plan.manifest.model.vocab_size != width:
            raise ValueError(f"{width} wide, the vocabulary has {plan.manifest.model.vocab_size}")
        try:
            hidden = _optional_view(program.hidden)
            return builder.finish(program.logits, hidden=hidden, threads=threads, instruction_set=instruction_set)
        except RuntimeError as error:
            raise PlanTargetError(f"{plan.path}: {threads} threads: {error}; ask for fewer") from error


def kv_layers(kv: KvLayout) -> list[tuple[int, int, str, str]]:
    """Return the cache's layers as the native module takes them."""
    return [
        (layer.num_kv_heads, layer.head_dim, kv.dtype_of(index), layer.keys) for index, layer in enumerate(kv.layers)
    ]


class _Blame:
    """Turns what the native builder refuses into an error that names the plan and the piece."""

    def __init__(self, plan: Plan, piece: str) -> None:
        self._plan = plan
        self._piece = piece

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError, KeyError)):
            detail = f"no weight {error}" if isinstance(error, KeyError) else str(error).partition("\n")[0]
            raise PlanCorruptError(
                f"{self._plan.path}: program section is damaged ({self._piece}: {detail})"
            ) from error


def _logits_width(program: CpuProgram, logits: int) -> int:
    if not 0 <= logits < len(program.buffers):
        raise ValueError(f"no buffer {logits}")
    buffer = program.buffers[logits]
    return buffer.width if isinstance(buffer, FloatBuffer) else buffer.features


def _add_heads(
    builder: _native.ProgramBuilder, plan: Plan, heads: CpuHeads, program: CpuProgram, weights: Mapping[str, int]
) -> None:
    info = plan.manifest.medusa
    with _Blame(plan, "its heads"):
        if info is None:
            raise ValueError("the manifest does not describe them")
        width = _logits_width(program, heads.logits)
        if width != info.draft_vocab_size:
            raise ValueError(f"their logits are {width} wide, the draft vocabulary has {info.draft_vocab_size}")
        if any(view.width != info.hidden_size for view in heads.inputs):
            raise ValueError(f"their inputs are not {info.hidden_size} wide, as hidden states are")
        builder.begin_heads(inputs=[_view(view) for view in heads.inputs], logits=heads.logits, count=info.num_heads)
    for op in heads.ops:
        with _Blame(plan, f"operation '{op.name}' of its heads"):
            _add_op(builder, op, weights)


def _add_weight(builder: _native.ProgramBuilder, plan: Plan, weight: Weight) -> int:
    data = plan.tensor(weight.tensor)
    match weight:
        case IntWeight():
            return builder.int_weight(
                _bytes(data),
                outputs=weight.outputs,
                features=weight.features,
                group=weight.group,
                bits=weight.bits,
                zeros=weight.zeros,
                wide_scales=weight.wide_scales,
                zero_point=weight.zero_point,
            )
        case FloatWeight():
            return builder.float_weight(
                _bytes(data), outputs=weight.outputs, features=weight.features, dtype=weight.dtype
            )
        case Table():
            return builder.table(_bytes(data), rows=weight.rows, features=weight.features, dtype=weight.dtype)
        case Vector():
            return builder.vector(_sized(data, np.dtype(np.float32), weight.length))
        case Permutation():
            return builder.permutation(_sized(data, np.dtype(np.int32), weight.length))


def _bytes(data: NDArray[Any]) -> NDArray[np.uint8]:
    return data.reshape(-1).view(np.uint8)


def _sized(data: NDArray[Any], dtype: np.dtype, length: int) -> NDArray[Any]:
    if data.dtype != dtype or data.shape != (length,):
        raise ValueError(f"the tensor is {data.dtype}{list(data.shape)}, want {dtype}[{length}]")
    return data


def _add_op(builder: _native.ProgramBuilder, op: Op, weights: Mapping[str, int]) -> None:
    match op:
        case Embed():
            builder.embed(weights[op.table], op.scale, _view(op.out))
        case Norm():
            builder.norm(
                _view(op.x),
                weight=weights[op.weight],
                bias=_optional_weight(op.bias, weights),
                epsilon=op.epsilon,
                heads=op.heads,
                centred=op.centred,
                before=_optional_view(op.before),
                after=_optional_view(op.after),
                sum=_optional_view(op.sum),
                out=_optional_view(op.out),
                quantized=op.quantized,
                permutation=_optional_weight(op.permutation, weights),
                quantized_scale=op.quantized_scale,
            )
        case Quantize():
            builder.quantize(
                _view(op.x),
                quantized=op.quantized,
                permutation=_optional_weight(op.permutation, weights),
                scale=op.scale,
            )
        case Linear():
            builder.linear(
                x=_optional_view(op.x),
                quantized=op.quantized,
                weight=weights[op.weight],
                bias=_optional_weight(op.bias, weights),
                residual=_optional_view(op.residual),
                gate=op.gate,
                out=_view(op.out),
            )
        case Rotation():
            builder.rotation(weights[op.frequencies], op.scale, _view(op.out))
        case Attention():
            builder.attention(
                layer=op.layer,
                num_heads=op.num_heads,
                num_kv_heads=op.num_kv_heads,
                head_dim=op.head_dim,
                scale=op.scale,
                window=op.window,
                softcap=op.softcap,
                interleaved=op.interleaved,
                logits_rows_only=op.logits_rows_only,
                rotation=_optional_view(op.rotation),
                q=_view(op.q),
                k=_view(op.k),
                v=_view(op.v),
                out=_view(op.out),
            )
        case Elementwise():
            builder.elementwise(
                steps=[(step.op, step.a, step.b, step.value) for step in op.steps],
                inputs=[_view(view) for view in op.inputs],
                vectors=[weights[name] for name in op.vectors],
                out=_view(op.out),
            )
        case GatherRows():
            builder.gather_rows(_view(op.x), _view(op.out))
        case PermuteFeatures():
            builder.permute(_view(op.x), permutation=weights[op.permutation], out=_view(op.out))


def _view(view: View) -> tuple[int, int, int]:
    return view.buffer, view.column, view.width


def _optional_view(view: View | None) -> tuple[int, int, int] | None:
    return None if view is None else _view(view)


def _optional_weight(name: str | None, weights: Mapping[str, int]) -> int | None:
    return None if name is None else weights[name]
