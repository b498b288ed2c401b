"""`optimc chat`: a conversation in the terminal, on an engine in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.errors import OptimcError, RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from optimc_runtime.chat_template import ChatTemplate
    from optimc_runtime.engine import Engine
    from optimc_runtime.request import RequestOutput, SamplingParams

Message = dict[str, str]

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="An engine.plan.", show_default=False)],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this one message and exit.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Most tokens of an answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p")] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")] = None,
    kv_memory: options.KvMemory = None,
    threads: options.Threads = None,
    speculation: options.Speculation = None,
    no_speculation: options.NoSpeculation = False,
    lossy_acceptance: options.LossyAcceptance = None,
    typical_epsilon: options.TypicalEpsilon = None,
    typical_delta: options.TypicalDelta = None,
    trust: options.Trust = False,
) -> None:
    """Talk to a plan. Answers stream as they are made; each is followed by its TTFT, TPOT and cached tokens."""
    from rich.console import Console

    from optimc.cli.engine_options import load_engine, speculation_options
    from optimc.plan import Plan
    from optimc_runtime.chat_template import ChatTemplate
    from optimc_runtime.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    speculated = speculation_options(
        speculation,
        none=no_speculation,
        default="auto",
        lossy_acceptance=lossy_acceptance,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
    )
    with Plan.open(plan_path) as plan:
        template = ChatTemplate.from_plan(plan)
        if template is None:
            raise RequestError(
                f"{plan_path} has no chat template, so it cannot chat; /v1/completions of `optimc serve` works"
            )
        engine = load_engine(plan, kv_memory=kv_memory, threads=threads, speculation=speculated, trust=trust)
        console = Console(highlight=False, soft_wrap=True)
        history: list[Message] = [{"role": "system", "content": system}] if system else []
        try:
            if prompt is not None:
                _answer(
                    engine, template, [*history, {"role": "user", "content": prompt}], params, console, figures=False
                )
                return
            console.print(f"[dim]{HELP}[/dim]")
            _converse(engine, template, history, params, console)
        finally:
            engine.close()


def _converse(
    engine: Engine, template: ChatTemplate, start: list[Message], params: SamplingParams, console: Console
) -> None:
    from rich.markup import escape

    history = list(start)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            history = list(start)
        elif line.startswith("/"):
            console.print(f"[dim]{HELP}[/dim]")
        elif line:
            asked: list[Message] = [*history, {"role": "user", "content": line}]
            try:
                history = [*asked, {"role": "assistant", "content": _answer(engine, template, asked, params, console)}]
            except OptimcError as error:
                console.print(f"[red]{escape(str(error))}[/red]")


def _read_line() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer(
    engine: Engine,
    template: ChatTemplate,
    messages: list[Message],
    params: SamplingParams,
    console: Console,
    *,
    figures: bool = True,
) -> str:
    """Stream one answer to standard output and return it; Ctrl-C ends it early and keeps what was said."""
    assert engine.tokenizer is not None, "a plan with a chat template has a tokenizer"
    pieces: list[str] = []
    last: RequestOutput | None = None
    outputs: Iterator[RequestOutput] = engine.stream(template.encode(engine.tokenizer, messages), params)
    try:
        for last in outputs:
            pieces.append(last.text)
            sys.stdout.write(last.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        close = getattr(outputs, "close", None)
        if close is not None:
            close()
    print()
    if last is not None and last.error is not None:
        raise last.error
    if figures and last is not None:
        console.print(f"[dim]{_figures(last)}[/dim]")
    return "".join(pieces)


def _figures(output: RequestOutput) -> str:
    timings, usage = output.timings, output.usage
    if timings.first_token_s is None or timings.finished_s is None:
        return "stopped"
    parts = [f"TTFT {(timings.first_token_s - timings.arrival_s) * 1e3:.0f} ms"]
    if usage.output_tokens > 1:
        tpot_s = (timings.finished_s - timings.first_token_s) / (usage.output_tokens - 1)
        parts.append(f"TPOT {tpot_s * 1e3:.1f} ms ({1 / tpot_s:.0f} tokens/s)" if tpot_s > 0 else "TPOT 0 ms")
    parts.append(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, {usage.output_tokens} output")
    return " · ".join(parts)
