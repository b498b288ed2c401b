"""An answer's text, as it comes, into text for the user and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call, whose arguments follow."""

    index: int
    """Of the calls of the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which are JSON once they are joined."""

    index: int
    text: str


Piece = TextPiece | CallBegun | CallArguments


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Where calls stand: behind a marker, one or more JSON objects with the keys "name" and "arguments" (or
    "parameters")."""

    opening: str
    closing: str = ""
    """Ends the calls, if there is such a marker."""
    filler: str = ""
    """Characters beside white space that may stand around the objects."""
    may_open_bare: bool = False
    """Whether an answer that begins with an object is calls, without the marker."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers there are."""
        return (self.opening, self.closing) if self.closing else (self.opening,)


_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS = 512
"""A longer beginning is not looked at; the object is read to its end then."""


class ToolParser:
    """Reads one answer. What it returns, joined, does not depend on how the text was cut.

    Arguments come as they are written if the name stands before them; an object in another order is read to its end
    first. What turns out to be no call of a known function is text. White space around calls is nobody's.
    """

    def __init__(self, syntax: CallSyntax, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self._syntax = syntax
        self._names = names
        self._new_id = new_id
        self.num_calls = 0
        self._step = self._begin if syntax.may_open_bare else self._in_text
        self._buffer = ""
        """Not looked at yet, or not decided."""
        self._space = ""
        """White space at the end of the text so far: the user's if more text follows, dropped if a call does."""
        self._follows_call = False
        """Whether nothing was said since the last call."""
        self._raw = ""
        """What was read since the calls were opened or since the last one: text, if no call comes of it."""
        self._is_opened = False
        """Whether `_raw` holds a marker, or an object's text, that no call has come of."""
        self._object = _Object()
        self._pieces: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return what is certain by now."""
        self._buffer += text
        while self._step():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """Return what is left now that the answer has ended."""
        pieces = self.push("")
        if self._step == self._in_object:
            if not self._object.is_begun:
                self._say(self._raw + self._object.text)
        elif self._step != self._between:
            self._say(self._buffer)
        elif self._is_opened:
            self._say(self._raw + self._buffer)
        if self._space and not self._follows_call:
            self._pieces.append(TextPiece(self._space))
        return pieces + self._pieces

    def _begin(self) -> bool:
        """Before the first character that is no white space, where calls may stand without their marker."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._open(self._buffer[: len(self._buffer) - len(rest)], rest)
        else:
            self._step = self._in_text
        return True

    def _in_text(self) -> bool:
        """Look for the marker; what may be its beginning is held back."""
        marker = self._syntax.opening
        said, found, rest = self._buffer.partition(marker)
        if found:
            self._say(said)
            self._open(marker, rest)
            return True
        held = next((n for n in range(len(marker) - 1, 0, -1) if said.endswith(marker[:n])), 0)
        self._say(said[: len(said) - held])
        self._buffer = said[len(said) - held :]
        return False

    def _between(self) -> bool:
        """Behind the marker, outside of an object."""
        rest = self._buffer.lstrip(self._syntax.filler + " \t\r\n")
        self._raw += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        closing = self._syntax.closing
        if not rest:
            return False
        if rest[0] == "{":
            self._object = _Object()
            self._step = self._in_object
            return True
        if closing and closing.startswith(rest) and rest != closing:
            return False
        if closing and rest.startswith(closing):
            self._raw += closing
            self._buffer = rest[len(closing) :]
        if self._is_opened:
            self._say(self._raw)
        self._step = self._in_text
        return True

    def _in_object(self) -> bool:
        """Within an object: a call, if it turns out to be one."""
        call = self._object
        self._buffer = call.push(self._buffer)
        if not call.is_begun and call.name in self._names:
            call.is_begun = True
            self._begin_call(call.name)
        if call.is_begun:
            part = call.take_arguments()
            if part:
                self._pieces.append(CallArguments(self.num_calls - 1, part))
        if not call.is_closed:
            return False
        if call.is_begun:
            self._step = self._between
            return True
        name, arguments = call.read()
        if name in self._names and arguments is not None:
            self._begin_call(name)
            self._pieces.append(CallArguments(self.num_calls - 1, arguments))
            self._step = self._between
        else:
            self._say(self._raw + call.text)
            self._step = self._in_text
        return True

    def _open(self, raw: str, rest: str) -> None:
        self._raw, self._buffer = raw, rest
        self._is_opened = True
        self._step = self._between

    def _begin_call(self, name: str) -> None:
        self._pieces.append(CallBegun(self.num_calls, self._new_id(), name))
        self.num_calls += 1
        self._space = self._raw = ""
        self._is_opened = False
        self._follows_call = True

    def _say(self, text: str) -> None:
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._pieces.append(TextPiece(shown.lstrip() if self._follows_call else shown))
            self._follows_call = False


class _Object:
    """A JSON object, read as it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.is_closed = False
        self.is_begun = False
        """Whether its call was announced."""
        self.name = ""
        """Known early if it stands first, with an object of arguments right behind."""
        self._scanned = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._arguments_start = 0
        self._arguments_end = 0
        self._taken = 0

    def push(self, text: str) -> str:
        """Take more text; return what stands behind the object's end."""
        self.text += text
        if not self.name and self._scanned < _MAX_HEAD_CHARS:
            head = _HEAD.match(self.text, 0, _MAX_HEAD_CHARS)
            if head is not None:
                self.name = head[1]
                self._arguments_start = self._taken = head.end()
        for at in range(self._scanned, len(self.text)):
            self._scan(self.text[at], at)
            if self.is_closed:
                rest = self.text[at + 1 :]
                self.text = self.text[: at + 1]
                return rest
        self._scanned = len(self.text)
        return ""

    def take_arguments(self) -> str:
        """Return the arguments' text that has come since the last call."""
        end = self._arguments_end or len(self.text)
        part = self.text[self._taken : end]
        self._taken = max(self._taken, end)
        return part

    def read(self) -> tuple[str, str | None]:
        """Return name and arguments, as JSON, of the whole object; None if it has none."""
        try:
            given = json.loads(self.text)
        except (ValueError, RecursionError):
            return "", None
        arguments = given.get("arguments", given.get("parameters"))
        name = given.get("name")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return "", None
        return name, json.dumps(arguments, ensure_ascii=False)

    def _scan(self, char: str, at: int) -> None:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char == "{":
            self._depth += 1
        elif char == "}":
            self._depth -= 1
            if self._depth == 1 and self.name and not self._arguments_end and at >= self._arguments_start:
                self._arguments_end = at + 1
            self.is_closed = self._depth == 0
