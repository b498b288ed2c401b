"""Compiles what a request says of its answer's shape, off the event loop."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool

from optimc.errors import RequestError
from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.protocol.generation import GenerationFields
from optimc_runtime.structured.grammar import Grammar
from optimc_runtime.structured.grammar_spec import GrammarSpec


async def grammar_of(
    context: ServerContext, fields: GenerationFields, calls: GrammarSpec | None = None
) -> Grammar | None:
    """Return the compiled grammar of the answer, None if it is free. `calls` is the grammar of tool calls that the
    answer must consist of. Raises RequestError if the grammar is at fault, or if there are two.

    Few are compiled at once: a hostile one takes a core for a while, and streams need the others.
    """
    spec = fields.grammar_spec()
    if spec is not None and calls is not None:
        raise RequestError(f"{spec.param} excludes tools that must be called; send one", param=spec.param)
    spec = spec or calls
    if spec is None:
        return None
    async with context.grammar_slots:
        return await run_in_threadpool(context.engine.compile_grammar, spec)
