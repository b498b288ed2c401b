"""Prompts that mean something, from a file: what speculation gains depends on the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.errors import ConfigError, Fault
from optimc_runtime.chat_template import ChatTemplate
from optimc_runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One line of the file."""

    kind: str
    """What sort of text it asks for; "" if the line does not say."""
    prompt: str | None
    """Text to be continued."""
    messages: tuple[dict[str, str], ...] = ()
    """Or a conversation to be answered."""

    def encode(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
        """Return the token ids. Raises ConfigError for a conversation without template."""
        if self.prompt is not None:
            return tokenizer.encode(self.prompt)
        if template is None:
            fault = Fault("--prompts", "holds conversations, and the plan has no chat template")
            raise ConfigError("options", [fault])
        return template.encode(tokenizer, self.messages)


def read_prompts(path: Path) -> list[FilePrompt]:
    """Read a JSON object per line: "prompt" (text) or "messages" (as in the API), and "kind" if wanted.

    Raises ConfigError with all faults.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("options", [Fault("--prompts", f"{path}: {error}")]) from error
    prompts: list[FilePrompt] = []
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line)))
            except ValueError as error:
                faults.append(Fault(f"{path}:{number}", str(error)))
    if not prompts and not faults:
        faults.append(Fault("--prompts", f"{path} holds no prompt"))
    if faults:
        raise ConfigError("options", faults)
    return prompts


def _prompt(row: Any) -> FilePrompt:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('must be an object with either "prompt" or "messages"')
    kind, text, messages = row.get("kind", ""), row.get("prompt"), row.get("messages", [])
    if not isinstance(kind, str) or not isinstance(text, str | None):
        raise ValueError('"kind" and "prompt" must be strings')
    if text == "" or (text is None and not messages):
        raise ValueError("is empty")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    ):
        raise ValueError('"messages" must be objects with "role" and "content"')
    return FilePrompt(kind, text, tuple(messages))
