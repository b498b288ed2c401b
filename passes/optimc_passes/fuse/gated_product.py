"""activation(gate) * up, whatever the activation: `swiglu` and `geglu` say which one they look for."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.pattern import MatchResult

from optimc_passes.dialect import DOMAIN, DOMAIN_VERSION, GATED_ACTIVATION
from optimc_passes.fuse.constants import static_dim
from optimc_passes.fuse.rule import ACCEPTED, Rule, declined


class GatedProduct(Rule):
    """The part that says what the activation is."""

    commute = True

    def activate(self, op: Any, gate: Any) -> Any:
        """Match the activation of the gate; its output is called "activated"."""
        raise NotImplementedError

    def activation(self, activated: ir.Value) -> str:
        """Return the activation's name in the dialect."""
        raise NotImplementedError


class GatedHalves(GatedProduct):
    """The gate and the other factor are the halves of one row, the gate first."""

    def pattern(self, op: Any, gate_up: Any) -> Any:
        """Match the split and what is done with its halves."""
        gate, up = op.Split(gate_up, _allow_other_inputs=True, _outputs=["gate", "up"])
        return op.Mul(self.activate(op, gate), up)

    def check(self, _context: Any, gate_up: ir.Value, gate: ir.Value, **_: Any) -> MatchResult:
        """Decline a split that is not into the two halves of a row."""
        split = gate.producer()
        assert split is not None
        last = -1 if gate_up.shape is None else len(gate_up.shape) - 1
        if split.attributes.get_int("axis", 0) not in (-1, last):
            return declined("the split is not along the last axis", split)
        widths = [static_dim(part, -1) for part in split.outputs]
        if None in widths or len(widths) != 2 or widths[0] != widths[1]:
            listed = " and ".join("?" if width is None else str(width) for width in widths)
            return declined(f"the split gives {listed} features, not two halves", split)
        return ACCEPTED

    def rewrite(self, op: Any, gate_up: ir.Value, activated: ir.Value, **_: Any) -> Any:
        """Emit the operator on the whole row."""
        activation = self.activation(activated)
        return op.op(GATED_ACTIVATION, gate_up, activation=activation, _domain=DOMAIN, _version=DOMAIN_VERSION)


class GatedPair(GatedProduct):
    """The gate and the other factor come from different places, as where their layers could not be merged."""

    def pattern(self, op: Any, gate: Any, up: Any) -> Any:
        """Match the activation and the product."""
        return op.Mul(self.activate(op, gate), up)

    def check(self, _context: Any, gate: ir.Value, up: ir.Value, **_: Any) -> MatchResult:
        """Decline a product that is broadcast."""
        if gate.shape is None or up.shape is None or tuple(gate.shape) != tuple(up.shape):
            return declined(f"gate and up have shapes {gate.shape} and {up.shape}, not one", gate)
        return ACCEPTED

    def rewrite(self, op: Any, gate: ir.Value, up: ir.Value, activated: ir.Value) -> Any:
        """Emit the operator on both."""
        activation = self.activation(activated)
        return op.op(GATED_ACTIVATION, gate, up, activation=activation, _domain=DOMAIN, _version=DOMAIN_VERSION)
