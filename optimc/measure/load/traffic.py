"""Traffic that was recorded, or written by hand: one request per line of JSON. The only reader of such files.

Four forms are read, each line for itself:

- ours, written by `optimc serve --log-traffic`: {"format": 1, "at_s": .., "messages": .. | "prompt": .., ..}
- plain: {"prompt": ..} or {"messages": ..}, with "kind", "max_tokens" if wanted
- traces: "at_s", or "timestamp" in milliseconds, with text or only lengths ("input_length", "output_length" and
  "hash_ids", as Mooncake publishes them)
- OpenAI batch: {"custom_id", "method", "url", "body"}; of the body, what is no part of a load is passed over
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from optimc.errors import ConfigError, Fault
from optimc.measure.prompts import ChatPrompt, Prompt

if TYPE_CHECKING:
    from optimc_runtime.chat_template import ChatTemplate
    from optimc_runtime.tokenizer import Tokenizer

FORMAT = 1
MAX_FAULTS = 20

MOST_TOKENS = 10**7
"""Largest token count: beyond, it is a mistake that would take all memory to make up."""

MOST_ID = 2**31 - 1
"""Largest token id."""

MOST_S = 10**13
"""Largest moment, seconds or milliseconds: of the clock since 1970, with room."""


@dataclass(frozen=True, slots=True)
class TrafficLine:
    """One request. What the line does not say is None or empty."""

    number: int = 0
    """Line of the file, from 1."""
    at_s: float | None = None
    """When it arrived, seconds from the start of the server or trace."""
    request_id: str | None = None
    tenant: str | None = None
    endpoint: Literal["chat", "completions"] | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation, as in the API."""
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None
    """Text to be continued, or its token ids."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole rendered prompt."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    max_tokens: int | None = None
    kind: str = ""
    """What sort of text it asks for."""
    hash_ids: tuple[int, ...] = ()
    """Mooncake: equal numbers stand for equal blocks of 512 tokens."""

    @property
    def has_text(self) -> bool:
        """Whether it says what was asked, not only how long that was."""
        return bool(self.messages) or self.prompt is not None or self.prompt_ids is not None

    def as_prompt(self) -> Prompt:
        """Return the request as a server takes it."""
        if self.messages:
            return ChatPrompt(self.messages, self.tools)
        prompt = self.prompt if self.prompt is not None else self.prompt_ids
        assert prompt is not None, "has_text says so"
        return prompt if isinstance(prompt, str) else list(prompt)

    def encode(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> list[int]:
        """Return the token ids. Raises ConfigError for text without tokenizer, or a conversation without template."""
        ids = self.prompt_ids if self.prompt_ids is not None else self.prompt
        if ids is not None and not isinstance(ids, str):
            return list(ids)
        if tokenizer is None:
            raise ConfigError("options", [Fault("--dataset", "needs a tokenizer, and the plan has none")])
        if isinstance(ids, str):
            return tokenizer.encode(ids)
        if template is None:
            raise ConfigError("options", [Fault("--dataset", "holds conversations, and the plan has no chat template")])
        return template.encode(tokenizer, self.messages, tools=self.tools or None)


def read_traffic(path: Path) -> Iterator[TrafficLine]:
    """Yield the requests of a file, in its order.

    Lines that cannot be read are passed over at first; then ConfigError names them, at most 20. So whoever acts on a
    request before the end may act on a file that turns out to be unusable.
    """
    faults: list[Fault] = []
    found = False
    try:
        with path.open("rb") as file:
            for number, line_bytes in enumerate(file, 1):
                if not line_bytes.strip():
                    continue
                try:
                    line = _line(number, _parsed(line_bytes))
                except ValueError as error:
                    faults.append(Fault(f"{path}:{number}", str(error)))
                    if len(faults) == MAX_FAULTS:
                        break
                    continue
                found = True
                yield line
    except OSError as error:
        raise ConfigError("traffic", [Fault(str(path), error.strerror or str(error))]) from error
    if not found and not faults:
        faults.append(Fault(str(path), "holds no request"))
    if faults:
        raise ConfigError("traffic", faults)


def traffic_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex. Raises ConfigError if it cannot be read, or only once."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        why = "can be read only once, and a dataset is read twice: to be told from others, and sent; save it to a file"
        raise ConfigError("traffic", [Fault(str(path), why)])
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError("traffic", [Fault(str(path), error.strerror or str(error))]) from error


def _parsed(line: bytes) -> Any:
    """Return a line's JSON. Raises ValueError for anything else."""
    try:
        row = json.loads(line.decode("utf-8-sig"))
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
        return row
    except UnicodeEncodeError as error:
        raise ValueError("holds half a surrogate pair, which no text can") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _line(number: int, row: Any) -> TrafficLine:
    if not isinstance(row, dict):
        raise ValueError("must be an object")
    if "body" in row:
        return _batch_line(number, row)
    if row.get("format", FORMAT) != FORMAT:
        raise ValueError(f'"format" {row["format"]!r} is not read by this version, which knows {FORMAT}')
    unknown = sorted(row.keys() - _READERS.keys() - {"format"})
    if unknown:
        raise ValueError(f"unknown {'field' if len(unknown) == 1 else 'fields'} {', '.join(map(repr, unknown))}")
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if name != "format" and value is not None:
            field, read = _READERS[name]
            if field in fields:
                raise ValueError(f'"{name}" says again what another field said')
            fields[field] = read(name, value)
    line = TrafficLine(number=number, **fields)
    if "prompt" in row and "messages" in row:
        raise ValueError('has both "prompt" and "messages"')
    if not line.has_text and line.prompt_tokens is None:
        raise ValueError('has no request: give "prompt", "messages" or "prompt_tokens"')
    if line.hash_ids and line.has_text:
        raise ValueError('"hash_ids" stand for text, and there is text')
    return line


def _batch_line(number: int, row: Mapping[str, Any]) -> TrafficLine:
    body, url = row["body"], str(row.get("url", ""))
    unknown = sorted(row.keys() - {"custom_id", "method", "url", "body"})
    if unknown or not isinstance(body, dict):
        raise ValueError(f"unknown fields {unknown} beside a batch's body" if unknown else '"body" must be an object')
    if not url.endswith("/completions"):
        raise ValueError(f'"url" {url!r} is no completion')
    known = {name: body[name] for name in ("messages", "tools", "prompt", "max_tokens") if body.get(name) is not None}
    if "max_tokens" not in known and body.get("max_completion_tokens") is not None:
        known["max_tokens"] = body["max_completion_tokens"]
    endpoint = "chat" if url.endswith("/chat/completions") else "completions"
    return _line(number, {**known, "endpoint": endpoint, "request_id": row.get("custom_id")})


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f'"{name}" must be a string')
    return value


def _count(name: str, value: Any, most: int = MOST_TOKENS) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f'"{name}" must be a whole number, at least 0 and at most {most:,}')
    return value


def _seconds(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_S:
        raise ValueError(f'"{name}" must be a number, at least 0 and at most {MOST_S:,}')
    return float(value)


def _milliseconds(name: str, value: Any) -> float:
    return _seconds(name, value) / 1000


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f'"{name}" must be a list of whole numbers')
    return tuple([_count(name, item, MOST_ID) for item in value])


def _hashes(name: str, value: Any) -> tuple[int, ...]:
    """Hashes are only compared: any whole numbers do."""
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise ValueError(f'"{name}" must be a list of whole numbers')
    return tuple(value)


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if not isinstance(value, str | list):
        raise ValueError(f'"{name}" must be a string, or a list of token ids')
    if not value:
        raise ValueError("is empty")
    return value if isinstance(value, str) else _ids(name, value)


def _messages(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    ):
        raise ValueError(f'"{name}" must be objects with "role" and "content"')
    if not value:
        raise ValueError("is empty")
    return tuple(value)


def _tools(name: str, value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f'"{name}" must be a list of objects')
    return tuple(value)


def _endpoint(name: str, value: Any) -> str:
    if value not in ("chat", "completions"):
        raise ValueError(f'"{name}" must be "chat" or "completions", got {value!r}')
    return str(value)


_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "at_s": ("at_s", _seconds),
    "timestamp": ("at_s", _milliseconds),
    "request_id": ("request_id", _text),
    "tenant": ("tenant", _text),
    "endpoint": ("endpoint", _endpoint),
    "messages": ("messages", _messages),
    "tools": ("tools", _tools),
    "prompt": ("prompt", _prompt),
    "prompt_ids": ("prompt_ids", _ids),
    "prompt_tokens": ("prompt_tokens", _count),
    "input_length": ("prompt_tokens", _count),
    "cached_tokens": ("cached_tokens", _count),
    "output_tokens": ("output_tokens", _count),
    "output_length": ("output_tokens", _count),
    "ttft_s": ("ttft_s", _seconds),
    "max_tokens": ("max_tokens", _count),
    "kind": ("kind", _text),
    "hash_ids": ("hash_ids", _hashes),
}
"""Field of the file -> field of TrafficLine, and what reads it."""
