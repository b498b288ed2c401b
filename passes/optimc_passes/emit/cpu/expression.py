"""Element-by-element expressions while they are put together: equal steps are shared, unused ones dropped."""

from __future__ import annotations

import math
from typing import TypeVar

from optimc.plan.cpu_program import BINARY_OPS, MAX_ELEMENTWISE_STEPS, UNARY_OPS, Elementwise, ElementwiseStep, View
from optimc_passes.emit.cpu.no_kernel import NoKernelError

ItemT = TypeVar("ItemT")

_LEAVES = ("rows", "vector", "constant")


class Expression:
    """Steps over rows, vectors and numbers. Methods return the index of a step."""

    def __init__(self) -> None:
        self.steps: list[ElementwiseStep] = []
        self._inputs: list[View] = []
        self._vectors: list[str] = []

    def rows(self, view: View) -> int:
        """Add an input."""
        return self._add("rows", _place(self._inputs, view))

    def vector(self, weight: str) -> int:
        """Add a vector, the same for every row."""
        return self._add("vector", _place(self._vectors, weight))

    def constant(self, value: float) -> int:
        """Add a number."""
        if not math.isfinite(value):
            raise NoKernelError(f"a constant is {value}")
        return self._add("constant", value=value)

    def apply(self, op: str, a: int, b: int = 0) -> int:
        """Add an operation on earlier steps. x * sigmoid(x) becomes silu(x)."""
        assert op in UNARY_OPS or op in BINARY_OPS, op
        if op == "mul":
            for x, factor in ((a, b), (b, a)):
                if self.steps[factor].op == "sigmoid" and self.steps[factor].a == x:
                    return self._add("silu", x)
        return self._add(op, a, b)

    def include(self, op: Elementwise, replaced: dict[int, int]) -> int:
        """Add another expression and return its result; `replaced` maps its inputs to steps that stand for them."""
        found: list[int] = []
        for step in op.steps:
            match step.op:
                case "rows":
                    found.append(replaced[step.a] if step.a in replaced else self.rows(op.inputs[step.a]))
                case "vector":
                    found.append(self.vector(op.vectors[step.a]))
                case "constant":
                    found.append(self.constant(step.value))
                case name:
                    found.append(self.apply(name, found[step.a], found[step.b] if name in BINARY_OPS else 0))
        return found[-1]

    def build(self, name: str, result: int, out: View) -> Elementwise | None:
        """Return the operation that leaves step `result` in `out`, or None if it takes too many steps."""
        needed = self._needed(result)
        if len(needed) > MAX_ELEMENTWISE_STEPS:
            return None
        inputs: list[View] = []
        vectors: list[str] = []
        steps: list[ElementwiseStep] = []
        places: dict[int, int] = {}
        for index in needed:
            step = self.steps[index]
            if step.op == "rows":
                step = step.model_copy(update={"a": _place(inputs, self._inputs[step.a])})
            elif step.op == "vector":
                step = step.model_copy(update={"a": _place(vectors, self._vectors[step.a])})
            elif step.op != "constant":
                second = places[step.b] if step.op in BINARY_OPS else 0
                step = step.model_copy(update={"a": places[step.a], "b": second})
            places[index] = len(steps)
            steps.append(step)
        return Elementwise(name=name, steps=tuple(steps), inputs=tuple(inputs), vectors=tuple(vectors), out=out)

    def _add(self, op: str, a: int = 0, b: int = 0, value: float = 0.0) -> int:
        return _place(self.steps, ElementwiseStep(op=op, a=a, b=b, value=value))

    def _needed(self, result: int) -> list[int]:
        """Steps the result depends on, itself last."""
        needed: set[int] = set()
        stack = [result]
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                step = self.steps[index]
                if step.op not in _LEAVES:
                    stack += [step.a, *([step.b] if step.op in BINARY_OPS else [])]
        return sorted(needed)


def _place(items: list[ItemT], item: ItemT) -> int:
    """Return where an item stands in the list, after appending it if it is new."""
    if item not in items:
        items.append(item)
    return items.index(item)
