"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.request import FinishReason, RequestOutput
from optimc_runtime.server.answer import Answer
from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.generate import Work, check_choices, reply
from optimc_runtime.server.intake import take_request
from optimc_runtime.server.logprobs import chat_logprobs
from optimc_runtime.server.prompts import chat_prompt
from optimc_runtime.server.protocol.chat import ChatRequest
from optimc_runtime.server.structured import grammar_of
from optimc_runtime.server.tools.parser import ToolParser
from optimc_runtime.server.tools.use import ToolUse, tool_use
from optimc_runtime.server.tools.wording import delta_of, joined
from optimc_runtime.server.traffic_log import Asked


async def chat_completions(context: ServerContext, request: Request) -> Response:
    """Continue a conversation."""
    fields = await take_request(context, request, ChatRequest)
    engine = context.engine
    check_choices(context, request.state.tenant, 1, fields.n)
    choices = fields.sampling(context.options.generation_defaults, vocab_size=engine.vocab_size)
    use = tool_use(fields, context.chat_template, engine.tokenizer)
    if use is not None and use.shows_markers:
        choices = tuple(replace(params, special_tokens_in_text=True) for params in choices)
    prompt = await chat_prompt(fields, context.chat_template, engine.tokenizer, max_seq_len=engine.max_seq_len)
    if context.options.traffic_log is not None:
        request.state.record.asked = Asked(
            "chat", [prompt], choices[0].max_tokens, messages=fields.messages, tools=fields.shown_tools
        )
    grammar = await grammar_of(context, fields, None if use is None else use.spec)
    if grammar is not None and use is not None and use.spec is None:
        use = None  # an answer that keeps to another grammar holds no calls
    shape = ChatShape(engine.tokenizer, return_token_ids=fields.return_token_ids, tools=use)
    return await reply(context, request, Work([prompt], choices, fields, grammar=grammar), shape)


class ChatShape:
    """Words choices as messages, and increments as deltas: the role first, the reason last and alone."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, tokenizer: TextTokenizer | None, *, return_token_ids: bool, tools: ToolUse | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._tools = tools
        self._begun: set[int] = set()
        self._parsers: dict[int, ToolParser] = {}

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a finished choice."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        finish_reason: str | None = answer.finish_reason
        if self._tools is not None:
            parser = self._tools.parser()
            text, calls = joined(parser.push(answer.text) + parser.finish())
            if calls:
                message = {**message, "content": text or None, "tool_calls": calls}
                finish_reason = self._reason(answer.finish_reason, parser)
        return {
            "index": index,
            "message": message,
            "logprobs": None if answer.logprobs is None else chat_logprobs(self._tokenizer, answer.logprobs),
            "finish_reason": finish_reason,
            **({"token_ids": answer.token_ids} if self._return_token_ids else {}),
        }

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the chunks that carry this increment."""
        chunks: list[dict[str, Any]] = []
        if index not in self._begun:
            self._begun.add(index)
            chunks.append(_chunk(index, {"role": "assistant", "content": ""}))
        deltas, finish_reason = self._deltas(index, output)
        figures: dict[str, Any] = {}
        if output.logprobs is not None:
            figures["logprobs"] = chat_logprobs(self._tokenizer, output.logprobs)
        if self._return_token_ids:
            figures["token_ids"] = list(output.token_ids)
        if output.token_ids and figures and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            chunks.append({**_chunk(index, delta), **figures})
            figures = {}  # said once
        if finish_reason is not None:
            chunks.append(_chunk(index, {}, finish_reason))
        return chunks

    def _deltas(self, index: int, output: RequestOutput) -> tuple[list[dict[str, Any]], str | None]:
        """Return what the increment adds to the message, and the finish reason if it is the last."""
        if self._tools is None:
            return [{"content": output.text}] if output.text else [], output.finish_reason
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._tools.parser()
        pieces = parser.push(output.text)
        if output.finish_reason is not None:
            pieces += parser.finish()
        return [delta_of(piece) for piece in pieces], self._reason(output.finish_reason, parser)

    def _reason(self, reason: FinishReason | None, parser: ToolParser) -> str | None:
        assert self._tools is not None
        called = reason == "stop" and parser.num_calls > 0 and not self._tools.is_named
        return "tool_calls" if called else reason


def _chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
