"""Calls as the API words them: whole, and as deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimc_runtime.server.tools.parser import CallArguments, CallBegun, Piece, TextPiece


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return the delta of a streamed message that carries `piece`."""
    match piece:
        case TextPiece(text):
            return {"content": text}
        case CallBegun(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def joined(pieces: Sequence[Piece]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of a whole message and its calls."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case TextPiece(text):
                texts.append(text)
            case CallBegun(_, call_id, name):
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            case CallArguments(index, text):
                calls[index]["function"]["arguments"] += text
    return "".join(texts), calls
