"""Options that were given and would change nothing: whoever gives one believes that it does, so it is refused."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from optimc.errors import Fault


def ignored_options(context: typer.Context | None, cases: Iterable[tuple[bool, Iterable[str], str]]) -> list[Fault]:
    """Return a fault for every parameter that stands on the command line and has no effect.

    `cases`: whether the parameters named are without effect, their names, and why. Defaults and environment variables
    are nobody's word. `context` is None where a command is called as a function: nothing is known then.
    """
    if context is None:
        return []
    shown = {str(parameter.name): max(parameter.opts, key=len) for parameter in context.command.params}
    faults = []
    for is_ignored, names, why in cases:
        for name in names if is_ignored else ():
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                faults.append(Fault(shown[name], why))
    return faults
