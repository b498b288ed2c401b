"""Applying one rule to a graph written as text, and running graphs before and after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnxscript.rewriter import MatchingTracer
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet


@dataclass(frozen=True)
class Applied:
    """What a rule did to a graph."""

    times: int
    before: ir.Model
    after: ir.Model
    reason: str
    """Why the nearest miss was declined; empty if the rule fired."""

    @property
    def operators(self) -> Counter[str]:
        return Counter(node.op_type for node in self.after.graph)

    def node(self, op_type: str) -> ir.Node:
        (found,) = (node for node in self.after.graph if node.op_type == op_type)
        return found

    def assert_equal(self, **inputs: np.ndarray) -> None:
        """Both graphs give the same outputs, up to float32 rounding."""
        before, after = (_run(model, inputs) for model in (self.before, self.after))
        for expected, actual in zip(before, after, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def _run(model: ir.Model, inputs: dict[str, np.ndarray]) -> list[Any]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def _apply(rule: RewriteRule, text: str) -> Applied:
    header = '<ir_version: 10, opset_import: ["" : 23]>\n'
    before, after = ir.from_onnx_text(header + text), ir.from_onnx_text(header + text)
    rules, tracer = RewriteRuleSet([rule]), MatchingTracer()
    rules.apply_to_model(after, tracer=tracer)
    times = rules.apply_to_model(after)
    misses = tracer.best_matches_map.get(rule, [])
    return Applied(times, before, after, "" if times or not misses else misses[0].match_result.reason)


@pytest.fixture(scope="session")
def apply_rule() -> Any:
    return _apply
