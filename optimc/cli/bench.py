"""`optimc bench`: latency and throughput of a plan or a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.progress import progress_bar
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from optimc_runtime.engine import Engine


def bench(
    plan_path: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="An engine.plan, run in process.")] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="An OpenAI-compatible server instead, for example http://127.0.0.1:8000."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model name at --url; the first it lists by default.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions at --url.")] = False,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Key for --url.", show_envvar=True)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens")] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens")] = 128,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Clients, each with one request at a time.")] = 1,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests measured; max(8, 4 × concurrency).")
    ] = None,
    warmup_requests: Annotated[
        int | None, typer.Option("--warmup-requests", help="Requests before those that count.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Fixes the prompts but for their first block.")] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Always make exactly --output-tokens tokens.")] = True,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="Send one prompt again and again: measures the prefix cache.")
    ] = False,
    shared_prefix_tokens: Annotated[
        int, typer.Option("--shared-prefix-tokens", help="Leading tokens all prompts share.")
    ] = 0,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help='Prompts to send in turn instead of random ids, each line {"prompt"} or {"messages"}.',
        ),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    speculation: options.Speculation = None,
    no_speculation: options.NoSpeculation = False,
    lossy_acceptance: options.LossyAcceptance = None,
    typical_epsilon: options.TypicalEpsilon = None,
    typical_delta: options.TypicalDelta = None,
    max_failure_rate: Annotated[
        float, typer.Option("--max-failure-rate", help="Exit with code 1 above this share of failed requests.")
    ] = 0.0,
    max_seqs: options.MaxSeqs = None,
    max_step_tokens: options.MaxStepTokens = None,
    kv_memory: options.KvMemory = None,
    threads: options.Threads = None,
    prefix_cache: options.PrefixCache = True,
    chunked_prefill: options.ChunkedPrefill = True,
    inflight_batching: options.InflightBatching = True,
    trust: options.Trust = False,
    as_json: options.Json = False,
) -> None:
    """Measure TTFT, TPOT and throughput in a closed loop. Warm-up is excluded, prompts are new in every run.

    With --speculation, blocks with and without it run in turns on one engine; give --prompts, as what is guessed of an
    answer to random ids means nothing. Without, tokens are not guessed ahead.

    TTFT: time to first token: from sending to the first chunk with content or a token, queueing included.

    TPOT: time per output token: (e2e - ttft) / (tokens - 1) per request; 1-token outputs excluded.

    ITL: gap between successive chunks of a request, whatever their number of tokens.

    E2E: from sending to the end of the answer.

    Queue: from arrival to the first step that worked on the request; part of ttft; in process only.

    Output tokens/s: steady state: tokens credited when they came, while all clients were busy.

    The same over the whole run: tokens of good requests over the time from first sent to last ended.

    Prefill tokens/s: prompt tokens not from the prefix cache over ttft, each summed; concurrency 1 only.

    p99: withheld below 300 samples.
    """
    from rich.console import Console

    from optimc.cli.engine_options import load_engine, speculation_options
    from optimc.measure.bench import run_bench
    from optimc.measure.speculation import bench_speculation
    from optimc.measure.workload import Workload

    if (plan_path is None) == (url is None):
        raise ConfigError("options", [Fault("bench", "give either a PLAN or --url")])
    speculated = speculation_options(
        speculation,
        none=no_speculation,
        default="off",
        lossy_acceptance=lossy_acceptance,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
    )
    if url is not None:
        given = {
            "--prompts": prompts_file is not None,
            "--speculation": speculation is not None,
            "--no-speculation": no_speculation,
        }
        faults = [Fault(name, "needs a PLAN, not --url") for name, is_given in given.items() if is_given]
        if faults:
            raise ConfigError("options", faults)
    config = Workload(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        concurrency=concurrency,
        requests=requests,
        warmup_requests=warmup_requests,
        seed=seed,
        ignore_eos=ignore_eos,
        prompts=None if prompts_file is None else prompts_file.name,
        temperature=temperature,
        same_prompts=same_prompts,
        shared_prefix_tokens=shared_prefix_tokens,
        max_failure_rate=max_failure_rate,
    )
    with progress_bar() as progress:
        if url is not None:
            result = run_bench(url, config, progress, model=model, chat=chat, api_key=api_key)
        else:
            assert plan_path is not None
            engine = load_engine(
                plan_path,
                max_seqs=max_seqs,
                max_step_tokens=max_step_tokens,
                kv_memory=kv_memory,
                threads=threads,
                prefix_cache=prefix_cache,
                chunked_prefill=chunked_prefill,
                inflight_batching=inflight_batching,
                speculation=speculated,
                trust=trust,
            )
            try:
                prompts = None if prompts_file is None else _encoded(prompts_file, plan_path, engine)
                if speculated.mode == "off":
                    result = run_bench(engine, config, progress, prompts=prompts)
                else:
                    result = bench_speculation(engine, config, progress, prompts=prompts)
            finally:
                engine.close()
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        Console().print(result.table())
    if not result.ok:
        raise typer.Exit(1)


def _encoded(path: Path, plan_path: Path, engine: Engine) -> list[list[int]]:
    """Return the token ids of a file's prompts."""
    from optimc.measure.prompt_file import read_prompts
    from optimc.plan import Plan
    from optimc_runtime.chat_template import ChatTemplate

    prompts = read_prompts(path)
    if engine.tokenizer is None:
        raise ConfigError("options", [Fault("--prompts", "needs a tokenizer, and the plan has none")])
    with Plan.open(plan_path) as plan:
        template = ChatTemplate.from_plan(plan)
    return [prompt.encode(engine.tokenizer, template) for prompt in prompts]
