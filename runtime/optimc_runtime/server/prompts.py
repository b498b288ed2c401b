"""From request bodies to token ids, off the event loop: a long prompt must not hold up other clients' streams."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool

from optimc.errors import RequestError
from optimc_runtime.server.client import PromptTemplate, TextTokenizer
from optimc_runtime.server.protocol.chat import ChatRequest, tools_text
from optimc_runtime.server.protocol.completions import Prompt
from optimc_runtime.server.protocol.generation import check_token_ids

PROBE_CHARS_PER_TOKEN = 16
"""Few texts reach half of this, so a probe of this many characters per token of the limit settles nearly all."""

MAX_PROBE_GROWTH = 16
"""How many times longer the next probe may be when one has not settled it, as with runs of spaces or dashes."""


async def completion_prompts(
    prompts: Sequence[Prompt], tokenizer: TextTokenizer | None, *, vocab_size: int, max_seq_len: int
) -> list[list[int]]:
    """Return the token ids of each prompt. Raises RequestError if one is empty, too long or outside the vocabulary."""

    def encode_all() -> list[list[int]]:
        return [_completion_ids(prompt, tokenizer, vocab_size, max_seq_len) for prompt in prompts]

    return await run_in_threadpool(encode_all)


async def chat_prompt(
    request: ChatRequest,
    template: PromptTemplate | None,
    tokenizer: TextTokenizer | None,
    *,
    max_seq_len: int,
) -> list[int]:
    """Return the token ids of the conversation. Raises RequestError if it cannot be rendered or is too long."""
    if template is None or tokenizer is None:
        raise RequestError(
            "this model has no chat template, so its chat format is unknown; send the text to /v1/completions, "
            "or rebuild the plan from a checkpoint with a template",
            param="messages",
            code="no_chat_template",
        )
    messages = request.messages
    # Every template marks each turn with a token at least.
    if len(messages) > max_seq_len:
        raise RequestError(f"{len(messages)} messages do not fit in {max_seq_len} tokens", param="messages")

    tools = request.shown_tools

    def encode() -> list[int]:
        # Joined, since many messages that would fit alone take as long as one that does not.
        texts = [message.text for message in messages]
        refuse_hopeless("".join([*texts, tools_text(tools)]), tokenizer, max_seq_len, "messages")
        shown = {"tools": [tool.for_template() for tool in tools]} if tools else {}
        return template.encode(
            tokenizer, [message.for_template() for message in messages], **shown, **request.chat_template_kwargs
        )

    return await run_in_threadpool(encode)


def _completion_ids(prompt: Prompt, tokenizer: TextTokenizer | None, vocab_size: int, max_seq_len: int) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("this plan has no tokenizer; send the prompt as token ids", param="prompt")
        refuse_hopeless(prompt, tokenizer, max_seq_len, "prompt")
        ids = tokenizer.encode(prompt)
    else:
        ids = prompt
        if len(ids) > max_seq_len:  # before anybody turns them into text again, as `echo` does
            raise RequestError(
                f"the prompt has {len(ids):,} tokens; this model takes {max_seq_len:,}",
                param="prompt",
                code="context_length_exceeded",
            )
        check_token_ids(ids, vocab_size, "prompt")
    if not ids:
        raise RequestError("the prompt is empty: there is no token to continue from", param="prompt")
    return ids


def refuse_hopeless(text: str, tokenizer: TextTokenizer, max_seq_len: int, param: str) -> None:
    """Refuse a text far beyond the limit after encoding a part of it; encoding megabytes takes seconds.

    Where the cut falls changes the count by a few tokens at most, hence the margin of two. A text of long tokens is
    probed again, as far as its tokens so far make likely to settle it.
    """
    hopeless = 2 * max_seq_len
    probe_chars = PROBE_CHARS_PER_TOKEN * max_seq_len
    while probe_chars < len(text):
        count = len(tokenizer.encode(text[:probe_chars], add_special_tokens=False))
        if count > hopeless:
            raise RequestError(
                f"{param}: the first {probe_chars:,} of {len(text):,} characters are {count:,} tokens already; "
                f"this model takes {max_seq_len:,}",
                param=param,
                code="context_length_exceeded",
            )
        probe_chars = int(probe_chars * min(MAX_PROBE_GROWTH, 1.1 * hopeless / max(1, count)))
