"""Compiles what a request says of its answer's shape, off the event loop."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.structured.grammar import Grammar


async def grammar_of(context: ServerContext, fields: GenerationFields) -> Grammar | None:
    """Return the compiled grammar of the answer, None if it is free. Raises RequestError if the grammar is at fault.

    Few are compiled at once: a hostile one takes a core for a while, and streams need the others.
    """
    spec = fields.grammar_spec()
    if spec is None:
        return None
    async with context.grammar_slots:
        return await run_in_threadpool(context.engine.compile_grammar, spec)
