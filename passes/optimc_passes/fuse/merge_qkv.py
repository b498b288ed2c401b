"""Merge the query, key and value projections of a layer: one product reads the activations once."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from optimc_passes.base import PassConfig
from optimc_passes.dialect.paged_attention import OP_TYPE, is_paged_attention
from optimc_passes.fuse.projection import Projection, merge, projections_feeding, why_not_merge
from optimc_passes.fuse.rule import FusionPass, Miss


class MergeQkvConfig(PassConfig):
    """No options."""


class MergeQkv(FusionPass[MergeQkvConfig, ir.Node, tuple[Projection, ...]]):
    """MatMul(x, Wq), MatMul(x, Wk), MatMul(x, Wv) that reach one PagedAttention become one MatMul and a Split.

    Between projection and attention anything may happen (bias, reshape, norm, RoPE). Widths may differ, as with
    grouped-query attention. Declined where the three cannot share one weight: other inputs, bit widths, groups or
    permutations, or a weight somebody else reads.
    """

    name = "merge_qkv"
    version = 1
    config_type = MergeQkvConfig

    def find(self, graph: ir.Graph) -> Iterable[ir.Node]:
        """Yield the attention nodes."""
        return (node for node in graph if is_paged_attention(node))

    def check(self, site: ir.Node) -> tuple[Projection, ...] | Miss:
        """Return the three projections, or why they stay apart."""
        found = []
        for role, value in zip(("query", "key", "value"), site.inputs, strict=True):
            assert value is not None
            feeding = projections_feeding(value, _before_attention)
            if len(feeding) != 1:
                return Miss(f"the {role} comes from {len(feeding)} linear layers, not one", site)
            found.append(feeding[0])
        if all(projection.node is found[0].node for projection in found):
            return Miss("one linear layer gives query, key and value already", site, done_already=True)
        if len({id(projection.node) for projection in found}) < len(found):
            return Miss("two of query, key and value come from one linear layer, the third does not", site)
        return why_not_merge(found) or tuple(found)

    def rewrite(self, graph: ir.Graph, match: tuple[Projection, ...]) -> None:
        """Join them."""
        merge(graph, match)


def _before_attention(node: ir.Node) -> bool:
    """Whether a node may lie between a projection and its attention: anything but another product or attention."""
    return node.op_type not in {"MatMul", "Gemm", OP_TYPE}
