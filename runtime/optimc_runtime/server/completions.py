"""`POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from optimc_runtime.request import RequestOutput
from optimc_runtime.server.answer import Answer
from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.generate import Work, check_choices, reply
from optimc_runtime.server.intake import take_request
from optimc_runtime.server.logprobs import CompletionLogprobs
from optimc_runtime.server.prompts import completion_prompts
from optimc_runtime.server.protocol.completions import CompletionRequest


async def completions(context: ServerContext, request: Request) -> Response:
    """Continue one or more prompts."""
    fields = await take_request(context, request, CompletionRequest)
    engine = context.engine
    check_choices(context, len(fields.prompt), fields.n)
    choices = fields.sampling(context.options.generation_defaults, vocab_size=engine.vocab_size)
    prompts = await completion_prompts(
        fields.prompt, engine.tokenizer, vocab_size=engine.vocab_size, max_seq_len=engine.max_seq_len
    )
    shape = CompletionShape(engine.tokenizer, return_token_ids=fields.return_token_ids)
    return await reply(context, request, Work(prompts, choices, fields), shape)


class CompletionShape:
    """Words choices and increments as plain text; the last increment carries the reason."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: TextTokenizer | None, *, return_token_ids: bool) -> None:
        self._return_token_ids = return_token_ids
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(tokenizer))

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a finished choice."""
        return {
            "index": index,
            "text": answer.text,
            "logprobs": None if answer.logprobs is None else self._logprobs[index].take(answer.logprobs),
            "finish_reason": answer.finish_reason,
            **({"token_ids": answer.token_ids} if self._return_token_ids else {}),
        }

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choice of the chunk that carries this increment; none if there is nothing to tell."""
        tells_tokens = output.token_ids and (output.logprobs is not None or self._return_token_ids)
        if not (output.text or tells_tokens or output.finish_reason):
            return []
        return [
            {
                "index": index,
                "text": output.text,
                "logprobs": None if output.logprobs is None else self._logprobs[index].take(output.logprobs),
                "finish_reason": output.finish_reason,
                **({"token_ids": list(output.token_ids)} if self._return_token_ids else {}),
            }
        ]
