"""The command line: one typer application, one place where errors become a line and an exit code.

Exit codes: 0 done, 1 done but a gate or an error limit failed, 2 the user's input cannot be used, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

import optimc
from optimc.cli.commands import CommandsOnDemand
from optimc.cli.slo_option import spread_slo
from optimc.errors import OptimcError

app = typer.Typer(
    name="optimc",
    cls=CommandsOnDemand,
    help="Compile a language-model checkpoint into one engine.plan, serve it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut option names short at 80 columns
    context_settings={"max_content_width": 120},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"optimc {optimc.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logs.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for package in ("optimc", "optimc_passes", "optimc_runtime"):
        logging.getLogger(package).setLevel(logging.DEBUG if debug else logging.INFO)


def main() -> None:
    """Run the command line; never shows a traceback unless asked to with `--debug`."""
    sys.argv = spread_slo(sys.argv)
    debug = "--debug" in sys.argv[1:]
    if debug:
        # Accepted anywhere on the line; typer itself would take it only before the command's name.
        sys.argv = [sys.argv[0], "--debug", *(argument for argument in sys.argv[1:] if argument != "--debug")]
    try:
        app()
    except OptimcError as error:
        _print_error("error", str(error), traceback=debug)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of our output went away, as in `optimc inspect PLAN | head`. Nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except Exception as error:  # our own bug: in one line, unless --debug asks for more
        message = f"{type(error).__name__}: {error} (--debug shows where; please report it)"
        _print_error("internal error", message, traceback=debug)
        raise SystemExit(1) from None


def _print_error(kind: str, message: str, *, traceback: bool) -> None:
    from rich.console import Console
    from rich.markup import escape

    stderr = Console(stderr=True, highlight=False, soft_wrap=True)
    if traceback:
        stderr.print_exception()
    stderr.print(f"[red]{kind}:[/red] {escape(message)}")
