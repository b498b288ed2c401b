"""Sizes as people write them: 512MiB, 2GiB."""

from __future__ import annotations

import re
from decimal import Decimal

SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|KiB|MiB|GiB)?")
_UNIT_BYTES = {
    None: 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}


def parse_bytes(text: str) -> int:
    """Turn "512MiB" into 536870912. Raises ValueError saying how a size is written."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a size; write for example 512MiB or 2GiB")
    # Decimal, because a float has no room for every size somebody may write.
    return int(Decimal(match[1]) * _UNIT_BYTES[match[2]])
