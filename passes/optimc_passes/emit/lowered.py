"""What every target's lowering returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimc.plan import KvLayout, PlanTensor


@dataclass(frozen=True)
class Lowered:
    """A model in the form one target runs, ready to be written into a plan."""

    program: dict[str, Any]
    """`Manifest.program`: private to the target, JSON values only."""
    tensors: list[PlanTensor]
    """Program bytes and weights. Each is loaded once, when the plan is written."""
    requirements: dict[str, str]
    """`TargetInfo.requirements`: what the machine that serves must have."""
    kv: KvLayout
