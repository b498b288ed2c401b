"""Errors that are results: a plan that cannot be built, opened or measured is told in its row, and the others go on."""

from __future__ import annotations

from optimc.errors import ConfigError, MissingExtraError, OptimcError, StorageError


def reason_of(error: OptimcError) -> str:
    """Return why one plan has no figures, in one line. Raises the error again if it is of the machine, not of the plan:
    no room to keep results in, or a package that is not installed, would meet every other plan too."""
    if isinstance(error, StorageError | MissingExtraError):
        raise error
    if isinstance(error, ConfigError):
        return faults_in_line(error)
    return next(iter(str(error).splitlines()), type(error).__name__)


def faults_in_line(error: ConfigError) -> str:
    """Return all faults in one line; their lines in the file are those of a recipe that nobody has written."""
    return "; ".join(f"{fault.where}: {fault.message}" if fault.where else fault.message for fault in error.faults)
