"""What a graph leaves open is filled in; what it declares stays."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest

from optimc_passes.graph.shapes import annotate, inferred


@pytest.fixture
def model(tiny_decoder: Callable[..., Any]) -> ir.Model:
    return tiny_decoder().model


def _declared(model: ir.Model) -> dict[str, list[int | str | None]]:
    values = [value for node in model.graph for value in node.outputs]
    return {
        value.name or "": [dim if isinstance(dim, int) else dim.value for dim in value.shape]
        for value in values
        if value.shape is not None
    }


def test_a_decoder_declares_what_follows_from_its_inputs(model: ir.Model) -> None:
    declared, found = _declared(model), inferred(model)
    assert {name: list(dims) for name, dims in declared.items()} == {
        name: [dim if isinstance(dim, int) else dim.value for dim in found[name]] for name in declared
    }


def test_open_dimensions_and_shapes_are_filled_in(model: ir.Model) -> None:
    before = _declared(model)
    nodes = list(model.graph)
    for node in nodes[::2]:
        node.outputs[0].shape = None
    for node in nodes[1::2]:
        assert node.outputs[0].shape is not None
        node.outputs[0].shape = ir.Shape([None] * len(node.outputs[0].shape))
    annotate(model, inferred(model))
    assert _declared(model) == before


def test_what_is_declared_stays(model: ir.Model) -> None:
    value = next(node for node in model.graph if node.op_type == "MatMul").outputs[0]
    value.shape = ir.Shape([7, None, "N"])
    annotate(model, inferred(model))
    assert _declared(model)[value.name or ""] == [7, "T", "N"]
