"""`--pin-prefix`: beginnings of prompts whose K/V stays cached, turned into token ids as those of requests are."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.errors import ConfigError, Fault, RequestError
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.engine import Engine
from optimc_runtime.server.prompts import chat_prompt, completion_prompts
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.parse import parse


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """A file given to `--pin-prefix`, read."""

    path: Path
    content: str | ChatRequest

    def pin(self, engine: Engine, template: ChatTemplate | None) -> int:
        """Pin what a request beginning so would have in the cache; return the number of blocks. Raises ConfigError
        naming the file if that cannot be."""
        try:
            return engine.pin_prefix(asyncio.run(self._encode(engine, template)))
        except RequestError as error:
            raise _fault(self.path, str(error)) from None
        except ConfigError as error:
            raise _fault(self.path, "; ".join(fault.message for fault in error.faults)) from None

    async def _encode(self, engine: Engine, template: ChatTemplate | None) -> list[int]:
        limit = engine.max_seq_len
        if isinstance(self.content, ChatRequest):
            return await chat_prompt(self.content, template, engine.tokenizer, max_seq_len=limit)
        [ids] = await completion_prompts(
            [self.content], engine.tokenizer, vocab_size=engine.vocab_size, max_seq_len=limit
        )
        return ids


def read_prefixes(paths: list[Path]) -> list[PrefixFile]:
    """Read the files: text, or in .json a list of messages or an object with `messages` and, say, `tools`.

    Raises ConfigError naming the first that is neither.
    """
    return [PrefixFile(path, _read(path)) for path in paths]


def _read(path: Path) -> str | ChatRequest:
    try:
        text = path.read_text(encoding="utf-8-sig")  # an editor's byte order mark begins no prompt
        if path.suffix != ".json":
            return text
        content: Any = json.loads(text)
    except OSError as error:
        raise _fault(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _fault(path, "is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"is not JSON: {error}") from None
    body = {"messages": content} if isinstance(content, list) else content
    if not isinstance(body, dict):
        raise _fault(path, "holds neither a list of messages nor an object with `messages`")
    try:
        return parse(ChatRequest, body, allow_unknown=False, on_unknown=lambda _names: None)
    except RequestError as error:
        raise _fault(path, str(error)) from None


def _fault(path: Path, message: str) -> ConfigError:
    return ConfigError("options", [Fault("--pin-prefix", f"{path}: {message}")])
