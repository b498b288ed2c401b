"""The commands there are, each imported when it is asked for: what one command needs delays no other one's start."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "build": "optimc.cli.build:build",
    "export": "optimc.cli.export:export",
    "inspect": "optimc.cli.inspect:inspect",
    "serve": "optimc.cli.serve:serve",
    "chat": "optimc.cli.chat:chat",
    "bench": "optimc.cli.bench:bench",
    "eval": "optimc.cli.evaluate:evaluate",
    "compare": "optimc.cli.compare:compare",
    "roofline": "optimc.cli.roofline:roofline",
    "attribute": "optimc.cli.attribute:attribute",
    "search": "optimc.cli.search:search",
    "prefix-report": "optimc.cli.prefix_report:prefix_report",
    "recipe-schema": "optimc.cli.recipe_schema:print_recipe_schema",
}
"""By name, in the order that help shows them: module and function."""


class CommandsOnDemand(TyperGroup):
    """A group of `COMMANDS`, of which only those are loaded that run, or that help tells about."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is typer's
        """Return all names, loaded or not."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, loaded now if it is not yet; None if there is none."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.add_command(_load(cmd_name))
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, command and what follows; for a name that is none, raises with the nearest there are."""
        if args and args[0] not in COMMANDS:
            for name in COMMANDS:  # the nearest are looked for among what is loaded
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)


def _load(name: str) -> Any:
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[..., None] = getattr(import_module(module), function)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name)(command)
    return typer.main.get_command(alone)
