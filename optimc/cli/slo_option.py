"""`--slo ttft=500 tpot=40`: several limits behind one option, which the option parser itself cannot read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimc.measure.load.slo import Slo

_LIMIT = re.compile(r"(?:ttft|tpot|e2e)=.*", re.DOTALL)
"""Whatever stands behind the sign: a limit that is none is refused as a limit, not as a word too many."""


def parse_slo(words: Sequence[str] | None) -> Slo | None:
    """Return the limits that all --slo together set; None without any. Raises ConfigError with all faults."""
    from optimc.measure.load.slo import Slo

    return None if words is None else Slo.parse(words)


def spread_slo(argv: Sequence[str]) -> list[str]:
    """Return the arguments with an --slo before every limit that follows another one: `--slo ttft=500 tpot=40` becomes
    `--slo ttft=500 --slo tpot=40`. Words that are no limits end the list and stay as they are."""
    spread: list[str] = []
    follows = False  # whether the words so far end in an --slo and its limits
    expects = False  # whether the last word was --slo, which takes whatever comes
    for word in argv:
        is_limit = _LIMIT.fullmatch(word) is not None
        if expects:
            follows = is_limit
            expects = False
        elif word == "--slo":
            expects, follows = True, False
        elif word.startswith("--slo="):
            follows = True
        elif follows and is_limit:
            spread.append("--slo")
        else:
            follows = False
        spread.append(word)
    return spread
