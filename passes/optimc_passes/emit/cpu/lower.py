"""Lowering to the cpu target: the graph becomes a straight line of a few fused operations on planned buffers.

See `optimc.plan.cpu_program` for what a program is and for the bytes of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from optimc.plan import KvDtype
from optimc_passes.choices import KvChoice
from optimc_passes.emit.cpu.find_hidden import find_head
from optimc_passes.emit.cpu.finish import finish
from optimc_passes.emit.cpu.fuse_gates import fuse_gates
from optimc_passes.emit.cpu.fuse_sums import fuse_sums
from optimc_passes.emit.cpu.heads import translate_heads
from optimc_passes.emit.cpu.hoist_rows import hoist_rows
from optimc_passes.emit.cpu.merge_elementwise import merge_elementwise
from optimc_passes.emit.cpu.quantize_activations import quantize_activations, refuse_static_scales
from optimc_passes.emit.cpu.remove_dead import remove_dead
from optimc_passes.emit.cpu.share_buffers import share_buffers
from optimc_passes.emit.cpu.share_tied_table import share_tied_table
from optimc_passes.emit.cpu.translate import translate
from optimc_passes.emit.heads_tensors import draft_vocab_tensors
from optimc_passes.emit.kv_layout import key_scale_tensors, kv_layout
from optimc_passes.emit.lowered import Lowered, LoweringOptions
from optimc_passes.emit.tensorrt_options import refuse_tensorrt_options
from optimc_passes.heads.heads import Heads
from optimc_passes.weights import Weight

BACKEND = "cpu"
VERSION = 4
KV_DTYPES: tuple[KvDtype, ...] = ("float32", "bfloat16", "int8", "int4")


def check_options(options: LoweringOptions) -> dict[str, str]:
    """Return why each option this target refuses is refused, by the option's name."""
    refused = refuse_tensorrt_options(options, BACKEND)
    if _kv_dtype(options) not in KV_DTYPES:
        known = ", ".join(KV_DTYPES)
        refused["kv_dtype"] = f"the {BACKEND} target has no pool of {options.kv_dtype}; use one of {known}"
    return refused


def lower(
    model: ir.Model,
    options: LoweringOptions,
    kv: Sequence[KvChoice] = (),
    weights: Mapping[str, Weight] | None = None,
    heads: Heads | None = None,
) -> Lowered:
    """Lower a dialect graph with attached weights; `model` is not changed.

    `kv` says the cache's format layer by layer, all of them in KV_DTYPES, and `weights` holds the scales it needs;
    without it `options.kv_dtype` is that of all layers, float32 if that is None.

    With `heads`, or `options.hidden`, the program also answers what its output head multiplies.

    Reads norm weights and scales; large tensors are packed when the plan is written, one at a time. Activations of
    products with integer weights are rounded to 8 bits unless `options.int8_activations` is False.

    Raises LoweringError naming a node there is no kernel for, or a weight that cannot have the activation scales asked
    for; and if hidden states are wanted of a graph whose output head cannot be found.
    """
    draft = translate(model)
    remove_dead(draft)
    hoist_rows(draft)
    head = find_head(draft) if options.hidden or heads is not None else None
    draft.hidden = None if head is None else head.hidden
    fuse_sums(draft)
    merge_elementwise(draft)
    fuse_gates(draft)
    if options.int8_activations is not False:
        quantize_activations(draft, options.activation_scales)
    else:
        refuse_static_scales(draft)
    remove_dead(draft)
    share_tied_table(draft)
    heads_draft = None
    if heads is not None:
        assert head is not None, "it was looked for above"
        heads_draft = translate_heads(heads, draft, head, options)
    share_buffers(draft)
    program, tensors = finish(draft, options.max_step_tokens, heads_draft)
    if heads is not None:
        tensors += draft_vocab_tensors(heads)
    described = program.model_dump(mode="json", exclude_none=True)
    layout = kv_layout(model, options.block_size, _kv_dtype(options), kv)
    return Lowered(described, [*tensors, *key_scale_tensors(layout, weights or {})], {}, layout)


def _kv_dtype(options: LoweringOptions) -> KvDtype:
    return options.kv_dtype or "float32"
