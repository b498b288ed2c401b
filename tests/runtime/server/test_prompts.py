"""A text that cannot fit is refused after encoding little more of it than would fit."""

from __future__ import annotations

import asyncio

import pytest

from optimc.errors import RequestError
from optimc_runtime.server.prompts import chat_prompt, completion_prompts
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.protocol.parse import parse

MAX_SEQ_LEN = 64


class RunTokenizer:
    """A token is up to `width` characters, as runs of spaces are in many vocabularies; counts what it encodes."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.encoded_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded_chars += len(text)
        return [1] * -(-len(text) // self.width)


class JoinTemplate:
    def encode(self, tokenizer, messages, **_):
        return tokenizer.encode("".join(message["content"] for message in messages))


@pytest.mark.parametrize("width", [1, 4, 64, 200])
def test_a_huge_text_of_long_tokens_is_refused_early(width):
    tokenizer = RunTokenizer(width)
    with pytest.raises(RequestError, match="this model takes 64"):
        asyncio.run(completion_prompts([" " * 10_000_000], tokenizer, vocab_size=9, max_seq_len=MAX_SEQ_LEN))
    assert tokenizer.encoded_chars < 20 * MAX_SEQ_LEN * max(16, width)


def test_many_messages_that_fit_alone_are_refused_early_together():
    tokenizer = RunTokenizer(64)
    body = {"messages": [{"role": "user", "content": " " * 60 * MAX_SEQ_LEN}] * 60}
    fields = parse(ChatRequest, body, allow_unknown=False, on_unknown=print)
    with pytest.raises(RequestError, match="this model takes 64"):
        asyncio.run(chat_prompt(fields, JoinTemplate(), tokenizer, max_seq_len=MAX_SEQ_LEN))
    assert tokenizer.encoded_chars < 20 * MAX_SEQ_LEN * 64


def test_a_text_of_long_tokens_that_fits_is_taken():
    tokenizer = RunTokenizer(64)
    (ids,) = asyncio.run(completion_prompts([" " * 60 * MAX_SEQ_LEN], tokenizer, vocab_size=9, max_seq_len=MAX_SEQ_LEN))
    assert len(ids) == 60
