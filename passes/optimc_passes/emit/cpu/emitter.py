"""Where translated operations go: a draft, and what is shared between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import onnx_ir as ir

from optimc.plan.cpu_program import Op, PermuteFeatures, Rotation, RowsKind, View
from optimc_passes.emit.cpu.constants import Constant
from optimc_passes.emit.cpu.draft import Draft
from optimc_passes.emit.cpu.expression import Expression
from optimc_passes.emit.cpu.no_kernel import NoKernelError
from optimc_passes.emit.cpu.values import Wave
from optimc_passes.emit.cpu.weights import PermutationSource, VectorSource, WeightSource


class Emitter:
    """Appends operations to a draft. A weight, rotation or permutation asked for twice is made once."""

    def __init__(self) -> None:
        self.draft = Draft()
        self._weights: dict[Hashable, str] = {}
        self._views: dict[Hashable, View] = {}

    def emit(self, op: Op) -> None:
        """Append an operation."""
        self.draft.ops.append(op)

    def new(self, name: str, rows: RowsKind, width: int) -> View:
        """Return a new buffer."""
        return self.draft.new_rows(name, rows, width)

    def weight(self, what: Hashable, name: str, make: Callable[[], WeightSource]) -> str:
        """Return the key of the weight that holds `what`."""
        if what not in self._weights:
            self._weights[what] = self.draft.add_weight(name, make())
        return self._weights[what]

    def vector(self, constant: Constant, inner: tuple[int, ...]) -> str:
        """Return the key of a constant that is broadcast to the axes of a row."""
        shape = constant.shape
        while len(shape) > len(inner) and shape[0] == 1:
            shape = shape[1:]
        try:
            fits = np.broadcast_shapes(shape, inner) == inner
        except ValueError:
            fits = False
        if not fits:
            raise NoKernelError(f"{list(constant.shape)} is not one value per element of a row of {list(inner)}")

        def spread() -> np.ndarray:
            return np.broadcast_to(constant.values().astype(np.float32, copy=False).reshape(shape), inner).reshape(-1)

        width = int(np.prod(inner))
        row = Constant(constant.name, (width,), np.dtype(np.float32), spread)
        return self.weight((id(constant), inner), constant.name, lambda: VectorSource(row))

    def order(self, order: Constant) -> str:
        """Return the key of a permutation; equal ones share a tensor."""
        what = order.values().astype(np.int32).tobytes()
        return self.weight(("order", what), order.name, lambda: PermutationSource(order))

    def expression(self, name: str, expression: Expression, result: int, rows: RowsKind, width: int) -> View:
        """Append an expression and return its result."""
        out = self.new(name, rows, width)
        op = expression.build(name, result, out)
        if op is None:
            raise NoKernelError(f"it takes {len(expression.steps)} steps")
        self.emit(op)
        return out

    def permuted(self, name: str, x: View, order: Constant) -> View:
        """Return x with its features in another order."""
        key = self.order(order)
        if (x, key) not in self._views:
            out = self.new(name, self.draft.rows_of(x), x.width)
            self.emit(PermuteFeatures(name=name, x=x, permutation=key, out=out))
            self._views[x, key] = out
        return self._views[x, key]

    def rotation(self, name: str, wave: Wave) -> View:
        """Return [T, 2 F]: cosines, then sines."""
        frequencies = wave.frequencies.values
        what = (frequencies.tobytes(), wave.scale)
        if what not in self._views:
            constant = Constant(f"{name}.frequencies", frequencies.shape, frequencies.dtype, lambda: frequencies)
            key = self.weight(what[0], constant.name, lambda: VectorSource(constant))
            out = self.new(name, "tokens", 2 * len(frequencies))
            self.emit(Rotation(name=name, frequencies=key, scale=wave.scale, out=out))
            self._views[what] = out
        return self._views[what]


def label(node: ir.Node) -> str:
    """Return where a node comes from: its module path, or the best name it has."""
    name = node.name or node.outputs[0].name or node.op_type
    path, _, operator = name.rpartition("/")
    return path if path and operator.startswith(node.op_type) else name
