"""What a tool parser makes of an answer's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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


class ToolParser(Protocol):
    """Reads one answer as it comes."""

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return what is certain by now."""
        ...

    def finish(self) -> list[Piece]:
        """Return what is left now that the answer has ended."""
        ...
