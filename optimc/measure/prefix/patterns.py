"""What changes from request to request by its nature: times and ids, as they are spelled in prompts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

_TEN_YEARS_S = 10 * 365.25 * 86_400
_REACH = 80
"""Characters on either side in which a time or id that holds a place may begin and end."""

_MONTH = r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"  # noqa: E501
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?(?:\s?(?:Z\b|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_TIMES = (
    rf"(?<![\w-])\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}(?:[T ,]\s?{_CLOCK})?",
    rf"(?<!\w)\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}(?:,?\s{_CLOCK})?",
    rf"\b(?:{_DAY},?\s)?{_MONTH}\.?\s\d{{1,2}}(?:st|nd|rd|th)?(?:\s{_CLOCK})?(?:,?\s\d{{4}})?(?:,?\s{_CLOCK})?",
    rf"\b(?:{_DAY},?\s)?\d{{1,2}}(?:st|nd|rd|th)?\s(?:of\s)?{_MONTH}\.?(?:,?\s\d{{2,4}})?(?:,?\s{_CLOCK})?",
    rf"\b{_DAY}\b(?:,?\s{_CLOCK})?",
    rf"(?<!\d){_CLOCK}",
)
_EPOCH = re.compile(r"(?<![\w.])(\d{10}|\d{13})(?:\.\d+)?(?!\w)")
_IDS = (
    r"(?i:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})",
    r"\b[A-Za-z]{1,12}[_-](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{3,}",
    r"(?<![A-Za-z0-9])(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}(?![A-Za-z0-9])",
    r"(?<![\w.])\d{6,}(?![\w.])",
)
_PATTERNS = {"timestamp": re.compile("|".join(_TIMES)), "id": re.compile("|".join(_IDS))}

Changing = Literal["timestamp", "id"]


def changing_at(text: str, char: int, kind: Changing, *, now_s: float) -> tuple[int, int] | None:
    """Return where the time or id that holds `char`, or ends there, begins and ends; None if there is none.

    A number of ten or thirteen digits is a time if it lies, in seconds or milliseconds, within ten years of `now_s`.
    """
    start = max(0, char - _REACH)
    window = text[start : char + _REACH]
    epoch = _covering(_EPOCH, window, char - start, lambda match: _is_near(match[1], now_s))
    if kind == "timestamp" and epoch is not None:
        return start + epoch[0], start + epoch[1]
    found = _covering(_PATTERNS[kind], window, char - start, lambda _: True)
    if found is None or (kind == "id" and epoch is not None):
        return None
    return start + found[0], start + found[1]


def _covering(
    pattern: re.Pattern[str], window: str, char: int, accepts: Callable[[re.Match[str]], bool]
) -> tuple[int, int] | None:
    for match in pattern.finditer(window):
        if match.start() <= char <= match.end() and accepts(match):
            return match.span()
    return None


def _is_near(digits: str, now_s: float) -> bool:
    at_s = int(digits) / (1000 if len(digits) == 13 else 1)
    return abs(at_s - now_s) < _TEN_YEARS_S
