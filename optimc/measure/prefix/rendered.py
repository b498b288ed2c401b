"""A request as the text a prefix cache sees, with the field that each character comes from.

Without a plan the text is a stand-in: tools as JSON, then each message as `<|role|>`, a line break, and its content.
Four characters are then a token, and whatever is counted in tokens is an estimate.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prefix.span import Span, covering, json_spans
from optimc.measure.prefix.trie import Units
from optimc.measure.prompts import HASH_TOKENS

MAX_UNITS = 1 << 16
"""What lies beyond is not looked at."""
CHARS_PER_TOKEN = 4
ID_BASE = 0x30000
"""Token ids of which no text is known stand as characters from here on, which Unicode's normal forms leave alone."""
_IDS = 0x110000 - ID_BASE
_MOST_UNIT = 2**31 - 1
_BOS_RUN = re.compile(r"(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<[|｜]begin▁of▁sentence[|｜]>)+")


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """One prompt. `spans` cover its text."""

    line: TrafficLine
    text: str
    spans: tuple[Span, ...]
    units: Units
    """[n] token ids, or code points of the text."""
    starts: Units | None
    """[n] character at which each unit begins; None: a unit is a character."""
    units_per_token: int
    """1, or CHARS_PER_TOKEN where tokens are estimated."""
    prompt_tokens: int
    """Of the whole prompt, by its log if that says so."""

    @property
    def is_estimated(self) -> bool:
        """Whether figures in tokens are guesses from lengths in characters."""
        return self.units_per_token != 1

    @property
    def tokens_per_unit(self) -> float:
        """Tokens that a unit stands for: what the log says over what was looked at, for a prompt that was not cut."""
        if not self.is_estimated or self.line.prompt_tokens is None or len(self.units) >= MAX_UNITS:
            return 1 / self.units_per_token
        return self.prompt_tokens / max(1, len(self.units))

    def span_at(self, char: int) -> Span:
        """Return the span of a character; of the last one for a position at the end."""
        at = bisect.bisect_right(self.spans, char, key=lambda span: span.start) - 1
        return self.spans[max(0, at)] if self.spans else Span(0, 0, "prompt")

    def unit_at(self, char: int) -> int:
        """Return how many units begin before character `char`."""
        return min(char, len(self.units)) if self.starts is None else int(np.searchsorted(self.starts, char))

    def char_at(self, unit: int) -> int:
        """Return where a unit begins; the end of the text for the position after the last."""
        if unit >= len(self.units):
            return len(self.text)
        return unit if self.starts is None else int(self.starts[unit])


def render(line: TrafficLine) -> Rendered | None:
    """Return the stand-in text of a request; None if the line says nothing of what was asked."""
    ids = line.prompt if isinstance(line.prompt, tuple) else line.prompt_ids
    if line.messages:
        return from_pieces(line, _pieces(line))
    if isinstance(line.prompt, str):
        return from_pieces(line, [(line.prompt, "prompt")])
    if ids is None and line.hash_ids:
        most = MAX_UNITS if line.prompt_tokens is None else min(MAX_UNITS, line.prompt_tokens)
        ids = tuple(unit for block in line.hash_ids[: -(-most // HASH_TOKENS)] for unit in _stand_ins(block))[:most]
    return None if ids is None else from_ids(line, ids)


def _stand_ins(block: int) -> range:
    """Return ids that stand for the tokens of a block: equal for equal numbers, others for others."""
    first = HASH_TOKENS * block
    if not 0 <= first <= _MOST_UNIT - HASH_TOKENS:
        # Too large for a unit as it is: a place among all of them, where two blocks hardly ever meet.
        first = int.from_bytes(hashlib.sha256(str(block).encode()).digest()[:8], "big") % (_MOST_UNIT - HASH_TOKENS)
    return range(first, first + HASH_TOKENS)


def from_ids(line: TrafficLine, ids: Sequence[int]) -> Rendered:
    """Return a prompt whose ids are all that is known: each stands as a character of its own."""
    units = np.array(ids[:MAX_UNITS], np.int32)
    repeated = next((i for i, unit in enumerate(ids) if unit != ids[0]), len(ids))
    text = "".join(chr(ID_BASE + token_id % _IDS) for token_id in ids[:MAX_UNITS])
    # A first token that comes twice is a BOS too many.
    first = 1 if repeated == 1 else repeated
    spans = covering([Span(first, len(text), "prompt")], len(text))
    return Rendered(line, text, spans, units, None, 1, line.prompt_tokens or len(ids))


def from_pieces(line: TrafficLine, pieces: Sequence[tuple[str, str]]) -> Rendered:
    """Return the prompt that `pieces` (text, path) make up, in characters."""
    spans, at = [], 0
    for piece, path in pieces:
        bos = _BOS_RUN.match(piece) if path == "prompt" else None
        spans.append(Span(at + (bos.end() if bos else 0), at + len(piece), path))
        at += len(piece)
    whole = "".join(piece for piece, _ in pieces)
    text = whole[:MAX_UNITS]
    kept = [Span(span.start, min(span.end, len(text)), span.path) for span in spans if span.start < len(text)]
    tokens = line.prompt_tokens if line.prompt_tokens is not None else max(1, len(whole) // CHARS_PER_TOKEN)
    return Rendered(
        line, text, covering(_split(kept, line, text), len(text)), codes_of(text), None, CHARS_PER_TOKEN, tokens
    )


def codes_of(text: str) -> Units:
    """Return the code points of a text, [n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def message_fields(index: int, message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (text, path) of what a message says, in the order templates have it; calls as JSON."""
    path = f"messages[{index}]"
    content = message.get("content")
    if isinstance(content, str):
        yield content, f"{path}.content"
    elif isinstance(content, list):
        for at, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"], f"{path}.content[{at}].text"
    for at, call in enumerate(message.get("tool_calls") or ()):
        yield json.dumps(call, ensure_ascii=False), f"{path}.tool_calls[{at}]"


def _pieces(line: TrafficLine) -> list[tuple[str, str]]:
    pieces: list[tuple[str, str]] = []
    for index, tool in enumerate(line.tools):
        pieces += [(json.dumps(tool, ensure_ascii=False), f"tools[{index}]"), ("\n", "template")]
    for index, message in enumerate(line.messages):
        pieces.append((f"<|{message.get('role')}|>\n", "template"))
        for piece in message_fields(index, message):
            pieces += [piece, ("\n", "template")]
    return pieces


def _split(spans: Sequence[Span], line: TrafficLine, text: str) -> Iterator[Span]:
    """Yield the spans, those of tools cut into their fields."""
    for span in spans:
        if span.path.startswith("tools["):
            tool = line.tools[int(span.path[6:-1])]
            yield from json_spans(tool, text, span.start, span.end, span.path)
        elif span.path != "template":
            yield span
