"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimc.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if there is no such file or no such object in it."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__} where an object is expected")
    return value


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file."""
    return read_json_object(path) if path.is_file() else {}
