"""gelu(gate) * up (https://arxiv.org/abs/2002.05202) as one GatedActivation, with either form of GELU."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from optimc_passes.fuse.gated_product import GatedHalves, GatedPair, GatedProduct
from optimc_passes.fuse.rule import FusionPass, NoOptions


class _Gelu(GatedProduct):
    def activate(self, op: Any, gate: Any) -> Any:
        """Match ONNX's operator."""
        return op.Gelu(gate, _outputs=["activated"])

    def activation(self, activated: ir.Value) -> str:
        """Return which of its two forms the operator computes."""
        node = activated.producer()
        assert node is not None
        return "gelu_tanh" if node.attributes.get_string("approximate", "none") == "tanh" else "gelu"


class GeluHalves(_Gelu, GatedHalves):
    """Of one row, as after merge_gate_up."""


class GeluPair(_Gelu, GatedPair):
    """Of two values."""


class Geglu(FusionPass[NoOptions]):
    """gelu(gate) * up becomes one operator, and the Split before it goes."""

    name = "geglu"
    version = 1
    config_type = NoOptions
    rules = (GeluHalves, GeluPair)
