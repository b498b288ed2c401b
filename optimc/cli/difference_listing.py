"""`optimc inspect A B`: what sets two plans apart, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimc.cli.format import format_bytes, format_options
from optimc.plan.plan_difference import Change, Changes, PlanDifference

MOST_TENSORS = 20
"""Tensors listed before they are only counted; `--json` has all."""


def list_difference(difference: PlanDifference) -> Iterator[str]:
    """Yield lines; a single one if nothing differs."""
    if difference.is_empty:
        yield "no difference in settings, passes, fusions or tensors"
        return
    yield from _section("settings", (f"{name}: {_values(change)}" for name, change in difference.settings.items()))
    yield from _section("passes", (_pass(name, change) for name, change in difference.passes.items()))
    yield from _section("fusions", (f"{name}: {_values(change)}" for name, change in difference.fusions.items()))
    yield from _section("quantized weights", _grouped(difference.quantization))
    yield from _section("tensors", _tensors(difference.tensors))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    listed = list(lines)
    if listed:
        yield title
        yield from (f"  {line}" for line in listed)


def _values(change: Change) -> str:
    return f"{_value(change.left)} → {_value(change.right)}"


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _pass(name: str, change: Change) -> str:
    if change.left is None:
        return f"+ {name}  {format_options(change.right)}"
    if change.right is None:
        return f"- {name}  {format_options(change.left)}"
    options = {
        option: Change(left=change.left.get(option), right=change.right.get(option))
        for option in dict.fromkeys([*change.left, *change.right])
        if change.left.get(option) != change.right.get(option)
    }
    return f"{name}  {', '.join(f'{option}: {_values(changed)}' for option, changed in options.items())}"


def _grouped(changes: Changes) -> Iterator[str]:
    """Yield one line for all weights whose property changed alike."""
    groups: dict[str, list[str]] = {}
    for name, change in changes.items():
        weight, _, key = name.rpartition(".")
        groups.setdefault(f"{key} {_values(change)}", []).append(weight)
    for what, weights in groups.items():
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        yield f"{what}: {weights[0]}{more}"


def _tensors(changes: Changes) -> Iterator[str]:
    for number, (name, change) in enumerate(changes.items()):
        if number == MOST_TENSORS:
            yield f"… {len(changes) - MOST_TENSORS} more (--json)"
            return
        if change.left is None:
            yield f"+ {name}  {_tensor(change.right)}"
        elif change.right is None:
            yield f"- {name}  {_tensor(change.left)}"
        elif _tensor(change.left) == _tensor(change.right):
            yield f"{name}  {_tensor(change.left)}, other contents"
        else:
            yield f"{name}  {_tensor(change.left)} → {_tensor(change.right)}"


def _tensor(facts: dict[str, Any]) -> str:
    return f"{facts['dtype']} {facts['shape']} {format_bytes(facts['bytes'])}"
