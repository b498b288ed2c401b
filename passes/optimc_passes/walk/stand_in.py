"""Running parts of a model's own code: other functions stand in for its modules, or end the run there.

Letters: T tokens of a window, C features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Stop(Exception):  # noqa: N818 - not an error
    """Ends a forward pass with what somebody wanted to see: the input of one window, and the arguments beside it."""

    def __init__(self, seen: Tensor, arguments: Mapping[str, Any] | None = None) -> None:
        super().__init__("not an error")
        self.seen = seen
        self.arguments = dict(arguments or {})


def stop_at_first(value: Tensor, **_arguments: Any) -> Any:
    """Stand in for a module and end the run with its first argument, [T, C] of one window."""
    raise Stop(value[0])


def stop_at_hidden_states(hidden_states: Tensor, **arguments: Any) -> Any:
    """Stand in for a module that is called by keywords; its other arguments are kept, too."""
    raise Stop(hidden_states[0], arguments)


def stopped(run: Callable[[], Any]) -> Stop:
    """Run until a stand-in stops it, and return with what."""
    try:
        run()
    except Stop as stop:
        # A traceback holds frames, and those their callers': a circle that keeps activations until it is looked for.
        return stop.with_traceback(None)
    raise AssertionError("the model returned without calling what it was stopped at")


@contextmanager
def replaced(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Let a module call `function` in place of its own `forward`."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@contextmanager
def all_replaced(modules: nn.ModuleList, function: Callable[..., Any]) -> Iterator[None]:
    """Let each of some modules, none replaced already, call `function`."""
    for module in modules:
        module.__dict__["forward"] = function
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward")


def put_parameter(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give a module the parameter `name`, which may lie in a module of its own inside it."""
    owner, _, last = name.rpartition(".")
    parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
    # Not through setattr: tied parameters are one object there, and each name is given its own here.
    module.get_submodule(owner)._parameters[last] = parameter
