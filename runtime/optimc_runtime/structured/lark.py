"""A grammar in Lark as llguidance takes it. What llguidance would misread, or work on for ever, is refused here."""

from __future__ import annotations

import json
import math
import re

from optimc_runtime.structured.grammar_spec import ONE_SPELLING, GrammarSpec

MAX_TEXT_BYTES = 64 << 10
MAX_REGEX_BYTES = 8 << 10


_HEADER = '%llguidance {"no_forcing": true}\n'
"""Not to look ahead for text that is certain: where a grammar leaves one token for ever, as `/a+/ /a+/ "x"` does, that
never ends."""

_OPTIONS = re.compile(r"%\s*llguidance")

MAX_JOINED_PATTERNS = 8
"""Patterns in a grammar whose schemas may ask for several of them at once. llguidance's words for a conflict it cannot
settle double with every pattern: 12 took 0.6 s, 20 more than anyone waits."""

MAX_MULTIPLE = 10_000
"""Of `multipleOf`, or of all of them that are joined: there is a state for every remainder."""

MAX_AMPERSANDS = 6
"""In a Lark grammar, where & joins expressions that must match at once: every one may multiply the work."""

_JOINS = re.compile(r'"(?:allOf|\$ref|[^"]*\\u[^"]*)"\s*:')
_PATTERN = re.compile(r'"(?:pattern|format|[^"]*\\u[^"]*)"\s*:')
"""An escaped key may be any."""
_MULTIPLE = re.compile(r'"(?:multipleOf|[^"]*\\u[^"]*)"\s*:\s*([0-9][0-9.eE+-]*)')


def lark_of(spec: GrammarSpec) -> str:
    """Return the grammar in Lark. Raises ValueError, in words, if its text cannot be that of its kind, is no Unicode,
    or asks for too much."""
    limit = MAX_REGEX_BYTES if spec.kind == "regex" else MAX_TEXT_BYTES
    size = len(spec.text.encode(errors="surrogatepass"))
    if size > limit:
        raise ValueError(f"{size:,} bytes; at most {limit:,} are taken")
    rules = _rules(spec)
    _check_schemas(rules)
    return _HEADER + rules


def _rules(spec: GrammarSpec) -> str:
    import llguidance

    if spec.kind == "regex":
        if _ends_in_escape(spec.text):
            raise ValueError("the expression ends in a backslash, which stands for nothing; double it to mean one")
        return f"start: /{llguidance.regex_to_lark(spec.text, '')}/"
    if spec.kind == "lark":
        if _OPTIONS.search(spec.text):
            raise ValueError("options of llguidance are not for the request to set")
        if spec.text.count("&") > MAX_AMPERSANDS:
            raise ValueError(
                f"the character & stands in it {spec.text.count('&')} times; at most {MAX_AMPERSANDS} are taken"
            )
        return spec.text
    schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    return f"start: %json {json.dumps({**schema, 'x-guidance': ONE_SPELLING})}"


def _check_schemas(grammar: str) -> None:
    """Raise ValueError for what llguidance would work on for ever."""
    is_joined = _JOINS.search(grammar) is not None
    count = len(_PATTERN.findall(grammar))
    if is_joined and count > MAX_JOINED_PATTERNS:
        raise ValueError(
            f"{count} patterns and formats in schemas that are joined by allOf or $ref; at most {MAX_JOINED_PATTERNS} "
            "are taken"
        )
    factors = {_factor(value) for value in _MULTIPLE.findall(grammar)}
    largest = math.prod(factors) if is_joined else max(factors, default=1)
    if largest > MAX_MULTIPLE:
        raise ValueError(f"multipleOf asks for multiples of {largest} (zeros aside); at most {MAX_MULTIPLE:,} is taken")


def _factor(number: str) -> int:
    """Return the digits of a JSON number, without the zeros at its ends: every one of 3, 0.3 and 300 is 3."""
    digits = number.lower().partition("e")[0].replace(".", "").strip("0")
    return int(digits[:18] or "1")


def _ends_in_escape(regex: str) -> bool:
    """Whether the slash that ends an expression in Lark would belong to its last character."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1
