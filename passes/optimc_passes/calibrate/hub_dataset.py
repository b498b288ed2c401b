"""Calibration texts from a data set on the hub, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from optimc.errors import CalibrationError, MissingExtraError
from optimc.wording import one_line
from optimc_passes.calibrate.text_files import text_of


def hub_texts(name: str, *, split: str, field: str, seed: int) -> Iterator[str]:
    """Yield the texts in `field` of the data set's rows, in an order that `seed` determines.

    Raises MissingExtraError without the `datasets` library, CalibrationError if the data set, the split or the field
    is missing.
    """
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise MissingExtraError("datasets", "datasets", f"calibration data set hub:{name}") from None
    try:
        rows: Any = datasets.load_dataset(name, split=split).shuffle(seed=seed)
    except Exception as error:  # the library, the network and the data set's own code fail in their own ways
        raise CalibrationError(f"hub:{name}, split {split}: cannot be loaded ({one_line(error)})") from error
    return (text_of(row, field, f"hub:{name}, row {number}") for number, row in enumerate(rows))
