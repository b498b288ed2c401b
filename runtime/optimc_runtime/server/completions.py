"""`POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from optimc.errors import RequestError
from optimc_runtime.request import RequestOutput, TokenLogprob
from optimc_runtime.server.answer import Answer
from optimc_runtime.server.client import TextTokenizer
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.generate import Work, check_choices, reply
from optimc_runtime.server.intake import take_request
from optimc_runtime.server.logprobs import CompletionLogprobs
from optimc_runtime.server.prompts import completion_prompts
from optimc_runtime.server.protocol.completions import CompletionRequest
from optimc_runtime.server.structured import grammar_of
from optimc_runtime.server.traffic_log import Asked

MAX_SCORED_IN_ALL = 32_768
"""Most prompt tokens whose log-probabilities one request may ask for, choices included: they are kept as objects until
the answer is written."""


async def completions(context: ServerContext, request: Request) -> Response:
    """Continue one or more prompts."""
    fields = await take_request(context, request, CompletionRequest)
    engine = context.engine
    check_choices(context, request.state.tenant, len(fields.prompt), fields.n)
    choices = fields.sampling(context.options.generation_defaults, vocab_size=engine.vocab_size)
    prompts = await completion_prompts(
        fields.prompt, engine.tokenizer, vocab_size=engine.vocab_size, max_seq_len=engine.max_seq_len
    )
    if fields.reports_prompt():
        _check_scored(sum(map(len, prompts)) * fields.n)
    if context.options.traffic_log is not None:
        request.state.record.asked = Asked("completions", prompts, choices[0].max_tokens, prompts=fields.prompt)
    grammar = await grammar_of(context, fields)
    echoes = await run_in_threadpool(_echoes, fields, prompts, engine.tokenizer) if fields.echo else None
    shape = CompletionShape(engine.tokenizer, return_token_ids=fields.return_token_ids, n=fields.n, echoes=echoes)
    return await reply(context, request, Work(prompts, choices, fields, grammar=grammar), shape)


@dataclass(frozen=True, slots=True)
class Echo:
    """What the choices of one prompt begin with."""

    text: str
    first_id: int
    """Its first token, which nothing predicts."""


class CompletionShape:
    """Words choices and increments as plain text; the last increment carries the reason.

    With `echoes`, one per prompt of `n` choices each, the first increment of every choice carries its prompt.
    """

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        tokenizer: TextTokenizer | None,
        *,
        return_token_ids: bool,
        n: int = 1,
        echoes: Sequence[Echo] | None = None,
    ) -> None:
        self._return_token_ids = return_token_ids
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(tokenizer))
        self._echoes = {} if echoes is None else dict(enumerate(echo for echo in echoes for _ in range(n)))
        """Those not told yet, by choice."""

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a finished choice."""
        echo = self._echoes.pop(index, None)
        return self._worded(
            index,
            answer.text if echo is None else echo.text + answer.text,
            self._figures(index, echo, answer.prompt_logprobs, answer.logprobs),
            answer.finish_reason,
            answer.token_ids,
        )

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choice of the chunk that carries this increment; none if there is nothing to tell."""
        echo = self._echoes.pop(index, None)
        text = output.text if echo is None else echo.text + output.text
        tells_tokens = output.token_ids and (output.logprobs is not None or self._return_token_ids)
        if not (text or tells_tokens or output.prompt_logprobs or output.finish_reason):
            return []
        figures = self._figures(index, echo, output.prompt_logprobs, output.logprobs)
        return [self._worded(index, text, figures, output.finish_reason, list(output.token_ids))]

    def _figures(
        self,
        index: int,
        echo: Echo | None,
        of_prompt: Sequence[TokenLogprob | None] | None,
        of_output: Sequence[TokenLogprob] | None,
    ) -> dict[str, Any] | None:
        if of_output is None:
            return None
        if echo is None or of_prompt is None:
            return self._logprobs[index].take(of_output)
        predicted = [token for token in of_prompt if token is not None]
        return self._logprobs[index].take([*predicted, *of_output], unpredicted=echo.first_id)

    def _worded(
        self,
        index: int,
        text: str,
        figures: dict[str, Any] | None,
        finish_reason: str | None,
        token_ids: list[int],
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": figures,
            "finish_reason": finish_reason,
            **({"token_ids": token_ids} if self._return_token_ids else {}),
        }


def _check_scored(count: int) -> None:
    if count > MAX_SCORED_IN_ALL:
        raise RequestError(
            f"echo with logprobs would report {count:,} prompt tokens; at most {MAX_SCORED_IN_ALL:,} per request are, "
            "choices included",
            param="echo",
        )


def _echoes(fields: CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: TextTokenizer | None) -> list[Echo]:
    """Return each prompt as it was sent; of token ids, the text, which is empty without a tokenizer."""

    def text_of(sent: str | list[int]) -> str:
        if isinstance(sent, str):
            return sent
        return "" if tokenizer is None else tokenizer.decode(sent, skip_special_tokens=False)

    return [Echo(text_of(sent), ids[0]) for sent, ids in zip(fields.prompt, prompts, strict=True)]
