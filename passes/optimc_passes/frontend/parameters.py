"""Parameters as trailing graph inputs: a graph that says what it needs and holds none of it."""

from __future__ import annotations

import onnx_ir as ir


def parameters_to_inputs(graph: ir.Graph, names: dict[str, str]) -> None:
    """Turn each initializer named in `names` into a graph input called `names[name]`, in the order of `names`.

    Initializers that are not parameters (rotary frequencies, constants) stay.
    """
    for exported, name in names.items():
        value = graph.initializers.pop(exported, None)
        if value is None:
            continue  # an unused parameter, or the second name of a tied one
        value.const_value = None
        value.name = name
        graph.inputs.append(value)
