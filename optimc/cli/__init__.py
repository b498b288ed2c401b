"""The `optimc` command."""

from optimc.cli.app import main

__all__ = ["main"]
