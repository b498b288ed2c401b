"""From a checked request to its reply, whole or streamed: the part both endpoints share."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from optimc.errors import OptimcError, RequestError
from optimc_runtime.request import RequestOutput, SamplingParams, Terms, Usage
from optimc_runtime.server.answer import Answer, usage_object
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.disconnect import unless_disconnected
from optimc_runtime.server.errors import ApiError, as_api_error, request_timeout
from optimc_runtime.server.options import ServerOptions
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.server.request_record import RequestRecord
from optimc_runtime.server.streaming import DONE, ChoiceEvents, EventStream, event
from optimc_runtime.server.submission import Submission

if TYPE_CHECKING:
    from optimc_runtime.structured.grammar import Grammar

logger = logging.getLogger(__name__)


class ReplyShape(Protocol):
    """How one endpoint words its choices. One object per reply: it may keep state per choice."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Return a finished choice."""
        ...

    def chunks(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the choices of the chunks, none to several, that carry this increment."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be generated: every choice for every prompt."""

    prompts: Sequence[Sequence[int]]
    choices: Sequence[SamplingParams]
    fields: GenerationFields
    grammar: Grammar | None = None
    """What every answer keeps to."""


def check_choices(context: ServerContext, tenant: str, num_prompts: int, n: int) -> None:
    """Raise RequestError if prompts times choices is above the server's limit, or more than would ever be taken in."""
    most = min(context.options.max_choices, context.engine.max_unfinished(tenant))
    if num_prompts * n > most:
        raise RequestError(
            f"{num_prompts} prompts with n={n} are {num_prompts * n} answers; "
            f"this server gives at most {most} per request",
            param="n",
        )


async def reply(context: ServerContext, request: Request, work: Work, shape: ReplyShape) -> Response:
    """Generate and answer. Nothing is left running if the client disconnects or anything fails.

    A streamed reply starts with the first token, so what fails before it (overload, a failed step) has its own status
    code, and no client can take an early header for a fast first token.
    """
    choices = _within_limits(context.options, work)
    # Reading the prompt and compiling a grammar go on to their end when the client leaves: it is looked for now.
    if await request.is_disconnected():
        raise ClientDisconnect
    name = f"{shape.id_prefix}-{uuid.uuid4().hex}"
    head = {"id": name, "created": int(time.time()), "model": context.model_name}
    record: RequestRecord = request.state.record
    record.accepted(
        name,
        prompts=len(work.prompts),
        choices=len(choices),
        stream=work.fields.stream,
        prompt_tokens=sum(map(len, work.prompts)),
    )
    submission = Submission(context.engine, context.metrics, context.mailbox, streams=work.fields.stream, record=record)
    context.submissions.add(submission)
    terms = Terms(tenant=request.state.tenant, priority=work.fields.priority)
    streams = False
    try:
        submission.start(name, work.prompts, choices, work.fields.cache_salt, terms, work.grammar)
        if not work.fields.stream:
            answers = await unless_disconnected(request.receive, _collect(submission))
            # Log-probabilities are long to word, and meanwhile others' streams would stand still.
            word = partial(_whole, {**head, "object": shape.whole_object}, answers, len(choices), shape)
            return await run_in_threadpool(word) if choices[0].logprobs is not None else word()
        first = await unless_disconnected(request.receive, submission.take())
        streams = True
    finally:
        if not streams:
            submission.abort()
    submission.give_up_at(request.state.deadline_s, request_timeout(context.options.request_timeout_s))
    events = _events({**head, "object": shape.chunk_object}, first, submission, work, shape, record)
    return EventStream(events, on_close=submission.abort)


def _within_limits(options: ServerOptions, work: Work) -> Sequence[SamplingParams]:
    """Return the choices, limited as the server says. Raises RequestError for a prompt or a wish above its limits."""
    most_prompt, most_output = options.max_prompt_tokens, options.max_output_tokens
    longest = max(map(len, work.prompts))
    if most_prompt is not None and longest > most_prompt:
        raise RequestError(
            f"the prompt has {longest:,} tokens; this server takes at most {most_prompt:,}",
            param="messages" if "messages" in work.fields.model_fields_set else "prompt",
            code="context_length_exceeded",
        )
    if most_output is None:
        return work.choices
    asked = work.choices[0].max_tokens
    given = {"max_tokens", "max_completion_tokens"} & work.fields.model_fields_set
    if given and asked is not None and asked > most_output:
        raise RequestError(
            f"{asked:,} output tokens are asked for; this server gives at most {most_output:,}", param=given.pop()
        )
    limit = most_output if asked is None else min(asked, most_output)
    return [replace(params, max_tokens=limit) for params in work.choices]


def _whole(head: dict[str, Any], answers: dict[int, Answer], num_choices: int, shape: ReplyShape) -> Response:
    return JSONResponse(
        {
            **head,
            "choices": [shape.choice(index, answers[index]) for index in sorted(answers)],
            "usage": usage_object(_usages(answers), num_choices),
        }
    )


async def _collect(submission: Submission) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    while outputs := await submission.take():
        for index, output in outputs:
            answers.setdefault(index, Answer()).add(output)
    return answers


async def _events(
    head: dict[str, Any],
    outputs: list[tuple[int, RequestOutput]],
    submission: Submission,
    work: Work,
    shape: ReplyShape,
    record: RequestRecord,
) -> AsyncIterator[bytes]:
    """Yield a streamed reply's events, those that can go out together as one: chunks, usage if asked for, `[DONE]`; or
    an error event, and no `[DONE]`."""
    # With usage asked for, every chunk has the key, null but in the last one.
    chunks = ChoiceEvents({**head, "usage": None} if work.fields.include_usage else head)
    usages: dict[int, Usage] = {}

    def word(index: int, output: RequestOutput) -> bytes:
        return b"".join(map(chunks.event, shape.chunks(index, output)))

    try:
        while outputs:
            ready = b""
            for index, output in outputs:
                if output.prompt_logprobs is None:
                    ready += word(index, output)
                else:  # thousands of tokens: as in a whole reply
                    ready += await run_in_threadpool(word, index, output)
                if output.finish_reason is not None:
                    usages[index] = output.usage
            if ready:
                yield ready
            outputs = await submission.take()
        if work.fields.include_usage:
            ordered = [usages[index] for index in sorted(usages)]
            yield event({**head, "choices": [], "usage": usage_object(ordered, len(work.choices))})
        yield DONE
    except Exception as error:  # the status line is sent: an event is the only way left to say so
        if not isinstance(error, ApiError | OptimcError):
            logger.exception("a streamed reply failed")
        failure = as_api_error(error)
        record.failed(failure.code)
        yield event(failure.body())


def _usages(answers: dict[int, Answer]) -> list[Usage]:
    usages = [answers[index].usage for index in sorted(answers)]
    return [usage for usage in usages if usage is not None]
