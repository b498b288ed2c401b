"""silu(gate) * up (https://arxiv.org/abs/2002.05202) as one GatedActivation."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from optimc_passes.fuse.gated_product import GatedHalves, GatedPair, GatedProduct
from optimc_passes.fuse.rule import FusionPass, NoOptions


class _Silu(GatedProduct):
    def activate(self, op: Any, gate: Any) -> Any:
        """Match gate * sigmoid(gate)."""
        return op.Mul(gate, op.Sigmoid(gate), _outputs=["activated"])

    def activation(self, activated: ir.Value) -> str:  # noqa: ARG002 - there is one
        """Return its name."""
        return "silu"


class SiluHalves(_Silu, GatedHalves):
    """Of one row, as after merge_gate_up."""


class SiluPair(_Silu, GatedPair):
    """Of two values."""


class Swiglu(FusionPass[NoOptions]):
    """gate * sigmoid(gate) * up becomes one operator, and the Split before it goes."""

    name = "swiglu"
    version = 1
    config_type = NoOptions
    rules = (SiluHalves, SiluPair)
