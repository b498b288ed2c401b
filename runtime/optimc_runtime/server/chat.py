"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.request import RequestOutput
from optimc_runtime.server.answer import Answer
from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.generate import Work, check_choices, reply
from optimc_runtime.server.intake import take_request
from optimc_runtime.server.logprobs import chat_logprobs
from optimc_runtime.server.prompts import chat_prompt
from optimc_runtime.server.protocol.chat import ChatRequest


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Continue a conversation."""
    fields = await take_request(context, request, ChatRequest)
    engine = context.engine
    check_choices(context, 1, fields.n)
    choices = fields.sampling(context.options.generation_defaults, vocab_size=engine.vocab_size)
    prompt = await chat_prompt(fields, context.chat_template, engine.tokenizer, max_seq_len=engine.max_seq_len)
    shape = ChatShape(engine.tokenizer, return_token_ids=fields.return_token_ids)
    return await reply(context, request, Work([prompt], choices, fields), shape)


class ChatShape:
    """Words choices as messages, and increments as deltas: the role first, the reason last and alone."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: TextTokenizer | None, *, return_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._begun: set[int] = set()

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a finished choice."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": None if answer.logprobs is None else chat_logprobs(self._tokenizer, answer.logprobs),
            "finish_reason": answer.finish_reason,
            **({"token_ids": answer.token_ids} if self._return_token_ids else {}),
        }

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the chunks that carry this increment."""
        chunks: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        if output.text or (output.token_ids and (output.logprobs is not None or self._return_token_ids)):
            chunk = _chunk(index, {"content": output.text})
            if output.logprobs is not None:
                chunk["logprobs"] = chat_logprobs(self._tokenizer, output.logprobs)
            if self._return_token_ids:
                chunk["token_ids"] = list(output.token_ids)
            chunks.append(chunk)
        if output.finish_reason is not None:
            chunks.append(_chunk(index, {}, output.finish_reason))
        return chunks


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
