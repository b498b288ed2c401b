"""A stand-in for `tensorrt` and `tensorrt.plugin`: checks what the real one checks, and plays a build.

Facts it stands on, from NVIDIA's Python sources of `tensorrt.plugin`: names and annotations are read with
`inspect.signature`; the three functions are called with tensors by position; types are asked for with fake sizes, whose
every operation is fake, while a builder of an earlier plugin may still be set, so that a constant is real and cannot be
combined with a fake from its left; sizes know + - * // == < with an integer or size on their right.
"""

import inspect
import typing
from types import SimpleNamespace

float32, float16, bfloat16 = "FP32", "FP16", "BF16"


class ShapeExpr:
    def __init__(self, value=None):
        self.value = value.value if isinstance(value, ShapeExpr) else value

    def _op(self, other, compute):
        if self.value is None:
            return ShapeExpr()
        other = other if isinstance(other, ShapeExpr) else ShapeExpr(other)
        assert other.value is not None, "a real size was combined with a fake one"
        return ShapeExpr(int(compute(self.value, other.value)))

    def __add__(self, other):
        return self._op(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._op(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._op(other, lambda a, b: a * b)

    def __floordiv__(self, other):
        return self._op(other, lambda a, b: a // b)

    def __lt__(self, other):
        return self._op(other, lambda a, b: a < b)

    def __bool__(self):
        raise AssertionError("a size was asked for its truth")


class SymInt32(ShapeExpr):
    pass


class SymIntExprs(list):
    @classmethod
    def from_tuple(cls, sizes):
        assert all(isinstance(size, SymInt32) for size in sizes)
        return cls(sizes)


class TensorDesc:
    def __init__(self, shape_expr, dtype):
        self.shape_expr = [size if isinstance(size, ShapeExpr) else ShapeExpr(size) for size in shape_expr]
        self.dtype = dtype


def from_shape_expr(shape_expr, dtype):
    return TensorDesc(shape_expr, dtype)


class KernelLaunchParams:
    def __init__(self, grid_x=1, grid_y=1, grid_z=1, block_x=1, block_y=1, block_z=1, shared_mem=0):
        self.grid = tuple(SymInt32(size).value for size in (grid_x, grid_y, grid_z))
        self.block = tuple(SymInt32(size).value for size in (block_x, block_y, block_z))
        self.shared_mem = SymInt32(shared_mem).value


class AutoTuneCombination:
    def __init__(self, io_types, layouts, tactics):
        assert all(tactic > 0 for tactic in tactics)
        self.io_types = [each.strip() for each in io_types.split(",")]
        self.tactics = tactics


class FakePlugins:
    """`tensorrt.plugin`."""

    TensorDesc, KernelLaunchParams, SymInt32, SymIntExprs = TensorDesc, KernelLaunchParams, SymInt32, SymIntExprs
    AutoTuneCombination = AutoTuneCombination
    from_shape_expr = staticmethod(from_shape_expr)

    def __init__(self):
        self.op = SimpleNamespace()
        self.plugins = {}

    def register(self, plugin_id):
        namespace, name = plugin_id.split("::")
        assert "." not in namespace + name
        assert namespace not in ("", "trt", "tensorrt", "std")

        def decorate(function):
            space = vars(self.op).setdefault(namespace, SimpleNamespace())
            if hasattr(space, name):
                raise ValueError(f"already has a definition for {name}")
            signature = inspect.signature(function)
            for parameter in signature.parameters.values():
                assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
                assert issubclass(parameter.annotation, TensorDesc)
            assert typing.get_origin(signature.return_annotation) is tuple
            outputs = typing.get_args(signature.return_annotation)
            assert all(issubclass(each, TensorDesc) for each in outputs)
            plugin = SimpleNamespace(
                describe=function,
                inputs=list(signature.parameters),
                num_outputs=len(outputs),
            )
            self.plugins[plugin_id] = plugin
            setattr(space, name, plugin)
            return function

        return decorate

    def autotune(self, plugin_id):
        def decorate(function):
            signature = inspect.signature(function)
            assert list(signature.parameters) == [*self.plugins[plugin_id].inputs, "outputs"]
            assert typing.get_origin(signature.return_annotation) is list
            assert issubclass(typing.get_args(signature.return_annotation)[0], AutoTuneCombination)
            self.plugins[plugin_id].autotune = function
            return function

        return decorate

    def aot_impl(self, plugin_id):
        def decorate(function):
            signature = inspect.signature(function)
            assert list(signature.parameters) == [*self.plugins[plugin_id].inputs, "outputs", "tactic"]
            kernel, image, params, extra = typing.get_args(signature.return_annotation)
            assert (kernel, image) == (str, str)
            assert issubclass(params, KernelLaunchParams)
            assert issubclass(extra, SymIntExprs)
            self.plugins[plugin_id].launch = function
            return function

        return decorate

    def build(self, plugin_id, inputs):
        """Play a build for inputs (type, shape): return outputs, types the plugin takes, and each tactic's launch."""
        plugin = self.plugins[plugin_id]
        assert len(inputs) == len(plugin.inputs)
        fakes = plugin.describe(*(TensorDesc([None] * len(shape), kind) for kind, shape in inputs))
        real = [TensorDesc(shape, kind) for kind, shape in inputs]
        outputs = plugin.describe(*real)
        assert [each.dtype for each in fakes] == [each.dtype for each in outputs]
        assert len(outputs) == plugin.num_outputs
        (combination,) = plugin.autotune(*real, outputs)
        launches = {}
        for tactic in combination.tactics:
            name, ptx, params, extra = plugin.launch(*real, outputs, tactic)
            launches[tactic] = SimpleNamespace(name=name, ptx=ptx, params=params, extra=[each.value for each in extra])
        shapes = [(each.dtype, tuple(size.value for size in each.shape_expr)) for each in outputs]
        return shapes, combination.io_types, launches
