"""Calibration texts from files: one text per .txt file, one per line of a .jsonl file."""

from __future__ import annotations

import json
from pathlib import Path

from optimc.errors import CalibrationError


def read_text_file(path: Path) -> list[str]:
    """Return the file's content as one text. Raises CalibrationError if it cannot be read as UTF-8."""
    return [_read(path)]


def read_jsonl_file(path: Path, field: str) -> list[str]:
    """Return the texts in `field` of each line, one JSON object per line; blank lines do not count.

    Raises CalibrationError naming the line that is not an object with a text under that name.
    """
    texts = []
    # Not splitlines: a text may hold the other characters Unicode calls line ends.
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"{path}: line {number} is not JSON ({error})") from error
        texts.append(text_of(row, field, f"{path}: line {number}"))
    return texts


def text_of(row: object, field: str, where: str) -> str:
    """Return the text under `field`. Raises CalibrationError naming the fields there are, if it is not among them."""
    if not isinstance(row, dict):
        raise CalibrationError(f"{where} is a {type(row).__name__}, not an object with a field '{field}'")
    value = row.get(field)
    if not isinstance(value, str):
        held = "no such field" if field not in row else f"a {type(value).__name__} there"
        raise CalibrationError(f"{where} has {held} as text field '{field}'; its fields: {', '.join(map(str, row))}")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path}: not UTF-8 text (byte {error.start})") from error
