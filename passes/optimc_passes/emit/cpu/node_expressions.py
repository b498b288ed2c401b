"""ONNX's elementwise operators as steps of an expression."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from optimc_passes.emit.cpu.expression import Expression
from optimc_passes.emit.cpu.no_kernel import NoKernelError

_UNARY = {
    "Neg": "neg",
    "Abs": "abs",
    "Sqrt": "sqrt",
    "Reciprocal": "reciprocal",
    "Exp": "exp",
    "Log": "log",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Erf": "erf",
    "Relu": "relu",
    "Softplus": "softplus",
    "Sin": "sin",
    "Cos": "cos",
}
_BINARY = {
    "Add": "add",
    "Sum": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Min": "min",
    "Max": "max",
}

Steps = Sequence[int | None]
"""A step per input of the node, None where it is absent."""


def is_elementwise(op_type: str) -> bool:
    """Whether `express` knows the operator."""
    return op_type in _UNARY or op_type in _BINARY or op_type in _SPECIAL


def express(node: ir.Node, inputs: Steps, expression: Expression) -> int:
    """Add the node to the expression and return the step of its result.

    Raises NoKernelError for attributes and constants it has no steps for.
    """
    if node.op_type in _SPECIAL:
        return _SPECIAL[node.op_type](node, inputs, expression)
    first, *others = _present(inputs)
    if node.op_type in _UNARY:
        return expression.apply(_UNARY[node.op_type], first)
    for other in others:
        first = expression.apply(_BINARY[node.op_type], first, other)
    return first


def _present(inputs: Steps) -> list[int]:
    return [step for step in inputs if step is not None]


def _pow(_node: ir.Node, inputs: Steps, e: Expression) -> int:
    x, power = _present(inputs)
    exponent = e.steps[power].value if e.steps[power].op == "constant" else None
    match exponent:
        case 1.0:
            return x
        case 2.0:
            return e.apply("mul", x, x)
        case 3.0:
            return e.apply("mul", e.apply("mul", x, x), x)
        case 0.5:
            return e.apply("sqrt", x)
        case -0.5:
            return e.apply("reciprocal", e.apply("sqrt", x))
        case -1.0:
            return e.apply("reciprocal", x)
    return e.apply("pow", x, power)


def _gelu(node: ir.Node, inputs: Steps, e: Expression) -> int:
    approximate = node.attributes.get_string("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise NoKernelError(f"approximate is '{approximate}'")
    return e.apply("gelu_tanh" if approximate == "tanh" else "gelu", _present(inputs)[0])


def _swish(node: ir.Node, inputs: Steps, e: Expression) -> int:
    (x,) = _present(inputs)
    alpha = node.attributes.get_float("alpha", 1.0)
    scaled = x if alpha == 1.0 else e.apply("mul", x, e.constant(alpha))
    return e.apply("mul", x, e.apply("sigmoid", scaled))


def _mish(_node: ir.Node, inputs: Steps, e: Expression) -> int:
    (x,) = _present(inputs)
    return e.apply("mul", x, e.apply("tanh", e.apply("softplus", x)))


def _clip(_node: ir.Node, inputs: Steps, e: Expression) -> int:
    x, low, high = [*inputs, None, None][:3]
    assert x is not None
    if low is not None:
        x = e.apply("max", x, low)
    return x if high is None else e.apply("min", x, high)


def _hard_sigmoid(node: ir.Node, inputs: Steps, e: Expression) -> int:
    alpha, beta = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    return _ramp(_present(inputs)[0], alpha, beta, e)


def _hard_swish(_node: ir.Node, inputs: Steps, e: Expression) -> int:
    (x,) = _present(inputs)
    return e.apply("mul", x, _ramp(x, 1 / 6, 0.5, e))


def _ramp(x: int, slope: float, offset: float, e: Expression) -> int:
    """max(0, min(1, slope * x + offset))."""
    line = e.apply("add", e.apply("mul", x, e.constant(slope)), e.constant(offset))
    return e.apply("relu", e.apply("min", line, e.constant(1.0)))


def _leaky_relu(node: ir.Node, inputs: Steps, e: Expression) -> int:
    (x,) = _present(inputs)
    return _two_slopes(x, e.constant(node.attributes.get_float("alpha", 0.01)), e)


def _prelu(_node: ir.Node, inputs: Steps, e: Expression) -> int:
    x, slope = _present(inputs)
    return _two_slopes(x, slope, e)


def _two_slopes(x: int, slope: int, e: Expression) -> int:
    negative = e.apply("min", x, e.constant(0.0))
    return e.apply("add", e.apply("relu", x), e.apply("mul", negative, slope))


def _elu(node: ir.Node, inputs: Steps, e: Expression) -> int:
    (x,) = _present(inputs)
    grown = e.apply("exp", e.apply("min", x, e.constant(0.0)))
    negative = e.apply("mul", e.apply("sub", grown, e.constant(1.0)), e.constant(node.attributes.get_float("alpha", 1)))
    return e.apply("add", e.apply("relu", x), negative)


_SPECIAL: dict[str, Callable[[ir.Node, Steps, Expression], int]] = {
    "Pow": _pow,
    "Gelu": _gelu,
    "Swish": _swish,
    "Mish": _mish,
    "Clip": _clip,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu,
    "PRelu": _prelu,
    "Elu": _elu,
}
