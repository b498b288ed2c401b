"""`optimc bench`: latency and throughput of a plan or a server."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optimc.cli import options
from optimc.cli.progress import progress_bar
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from optimc.measure.bench import BoundOf
    from optimc.measure.bench_result import BenchResult
    from optimc.measure.load.ladder_result import LadderResult
    from optimc.measure.load.traffic import TrafficLine
    from optimc.measure.workload import Workload
    from optimc.plan import Plan
    from optimc_runtime.engine import Engine

_ENGINE_OPTIONS = (
    *("max_seqs", "max_step_tokens", "kv_memory", "threads", "prefix_cache", "chunked_prefill", "inflight_batching"),
    *("trust", "cache_dir"),
)
_LENGTH_OPTIONS = ("prompt_tokens", "prompt_spread", "output_spread")


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
    prompt_tokens: options.PromptTokens = 512,
    prompt_spread: Annotated[
        float, typer.Option("--prompt-spread", help="0.5: lengths from half to one and a half times that, evenly.")
    ] = 0.0,
    output_tokens: options.OutputTokens = 128,
    output_spread: Annotated[float, typer.Option("--output-spread", help="The same for answers.")] = 0.0,
    concurrency: options.Clients = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests per second, open loop: latency counts from the scheduled moment."),
    ] = None,
    arrival: Annotated[
        str | None,
        typer.Option(
            "--arrival",
            help="Moments of an open loop: poisson (random, the default), constant, or trace (as --dataset says).",
        ),
    ] = None,
    rate_scale: Annotated[
        float, typer.Option("--rate-scale", help="With --arrival trace: send it so many times as fast.")
    ] = 1.0,
    duration: Annotated[
        float | None, typer.Option("--duration", help="Seconds of an open loop, instead of --requests.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option("--requests", help="Requests measured; max(8, 4 × concurrency), open loop max(60, 20 s of load)."),
    ] = None,
    warmup_requests: Annotated[
        int | None, typer.Option("--warmup-requests", help="Requests before those that count.")
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Runs; from 3 on with intervals that say how much runs differ.")
    ] = 1,
    seed: Annotated[
        int, typer.Option("--seed", help="Fixes arrivals, lengths, and the prompts but for their first block.")
    ] = 0,
    ignore_eos: Annotated[bool, typer.Option(help="Always make exactly --output-tokens tokens.")] = True,
    same_prompts: Annotated[
        bool, typer.Option("--same-prompts", help="Send one prompt again and again: measures the prefix cache.")
    ] = False,
    shared_prefix_tokens: Annotated[
        int, typer.Option("--shared-prefix-tokens", help="Leading tokens all prompts share.")
    ] = 0,
    turns: Annotated[
        int, typer.Option("--turns", help="User turns of each conversation; every one carries all before it.")
    ] = 1,
    turn_tokens: Annotated[int, typer.Option("--turn-tokens", help="New tokens of each turn but the first.")] = 64,
    dataset_file: Annotated[
        Path | None,
        typer.Option(
            "--dataset",
            "--prompts",
            metavar="FILE.jsonl",
            help='Requests to send in turn instead of random ids: {"prompt"} or {"messages"} per line, what '
            "`optimc serve --log-traffic` wrote, an OpenAI batch, or a trace.",
        ),
    ] = None,
    slo: options.Slo = None,
    ladder: Annotated[
        bool,
        typer.Option("--ladder", help="Raise the rate until the --slo breaks: finds the knee, and what broke first."),
    ] = False,
    rates: Annotated[
        str | None, typer.Option("--rates", metavar="LIST", help="With --ladder: try exactly these, as in 1,2,4.")
    ] = None,
    attain: options.Attain = 0.95,
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
    server_pid: Annotated[
        int | None,
        typer.Option(
            "--server-pid", help="Process of the server at --url, if on this machine: shows its CPU and memory."
        ),
    ] = None,
    no_bound: Annotated[
        bool,
        typer.Option(
            "--no-bound",
            help="Leave out how near the machine's limits it came; else the machine is measured once, about 20 s.",
        ),
    ] = False,
    cache_dir: options.CacheDir = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE.json", help="Write the JSON there too, whatever is shown.")
    ] = None,
    trust: options.Trust = False,
    as_json: options.Json = False,
    invocation: typer.Context = None,  # type: ignore[assignment]  # typer's own; None where this is called as a function
) -> None:
    """Measure TTFT, TPOT and throughput under load. Warm-up is excluded, prompts are new in every run.

    Closed loop (--concurrency): clients send their next request when the last has ended. Open loop (--rate): requests
    are sent when they are due, as users do who do not know of each other; a server that is too slow piles them up.

    With --ladder --slo, the rate is raised step by step: what can be served within the limits, and what breaks first.

    With --speculation, blocks with and without it run in turns on one engine; give --dataset, as what is guessed of an
    answer to random ids means nothing. Without, tokens are not guessed ahead.

    TTFT: time to first token: from sending to the first chunk with content or a token, queueing included.

    TPOT: time per output token: (e2e - ttft) / (tokens - 1) per request; 1-token outputs excluded.

    ITL: gap between successive chunks of a request, whatever their number of tokens.

    E2E: from sending to the end of the answer.

    Open loop: ttft and e2e start when a request was due, not when it was sent.

    Goodput: requests that succeeded within every limit of --slo; failed ones are in the total.

    Queue: from arrival to the first step that worked on the request; part of ttft; in process only.

    Output tokens/s: steady state: tokens credited when they came, while all clients were busy.

    The same over the whole run: tokens of good requests over the time from first sent to last ended.

    Prefill tokens/s: prompt tokens not from the prefix cache over ttft, each summed; concurrency 1 only.

    p99: withheld below 300 samples.

    95%: interval of the value before it: over runs, or by bootstrap (p99: order statistics) within the only one.
    """
    from rich.console import Console

    from optimc.cli.engine_options import load_engine, speculation_options
    from optimc.cli.ignored_options import ignored_options
    from optimc.cli.load_options import make_workload, parse_rates, read_dataset
    from optimc.cli.output_file import output_fault, write_output
    from optimc.measure.bench import run_bench
    from optimc.measure.engine_ladder import MOST_CLIENTS
    from optimc.measure.load.ladder import check_ladder, run_ladder
    from optimc.measure.load.repeats import repeat_bench
    from optimc.measure.speculation import bench_speculation
    from optimc.plan import Plan

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
    workload = make_workload(
        concurrency=concurrency,
        rate=rate,
        arrival=arrival,
        dataset_file=dataset_file,
        turns=turns,
        slo=slo,
        is_ladder=ladder,
        prompt_tokens=prompt_tokens,
        prompt_spread=prompt_spread,
        output_tokens=output_tokens,
        output_spread=output_spread,
        turn_tokens=turn_tokens,
        rate_scale=rate_scale,
        duration_s=duration,
        requests=requests,
        warmup_requests=warmup_requests,
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        same_prompts=same_prompts,
        shared_prefix_tokens=shared_prefix_tokens,
        max_failure_rate=max_failure_rate,
    )
    tried = parse_rates(rates)
    if ladder:
        check_ladder(workload, attain, tried)
    rules = [
        ("--repeats", repeats >= 1, f"must be at least 1, got {repeats}"),
        ("--rates", rates is None or ladder, "needs --ladder"),
        ("--speculation", url is None or speculation is None, "needs a PLAN, not --url"),
        ("--no-speculation", url is None or not no_speculation, "needs a PLAN, not --url"),
        ("--server-pid", url is not None or server_pid is None, "needs --url; with a PLAN this process is watched"),
    ]
    faults = [Fault(name, message) for name, is_fine, message in rules if not is_fine]
    faults += ignored_options(
        invocation,
        [
            (url is None, ("model", "chat", "api_key"), "needs --url"),
            (url is not None, _ENGINE_OPTIONS, "is the server's to set; with --url it changes nothing here"),
            (url is not None, ("no_bound",), "needs a PLAN: with --url nobody asks how near a bound it came"),
            (not ladder, ("attain",), "needs --ladder"),
            (turns == 1, ("turn_tokens",), "needs --turns"),
            (dataset_file is not None, _LENGTH_OPTIONS, "is for random prompts; --dataset has its own"),
        ],
    )
    unwritable = output_fault(output, "--output")
    if unwritable is not None:
        faults.append(unwritable)
    if faults:
        raise ConfigError("options", faults)
    result: BenchResult | LadderResult
    with progress_bar() as progress, ExitStack() as stack:
        bound = None
        max_concurrency = MOST_CLIENTS
        if url is not None:
            dataset = None if dataset_file is None else read_dataset(dataset_file, workload, None)
            measure: Callable[[Workload], BenchResult] = partial(
                run_bench,
                url,
                progress=progress,
                model=model,
                chat=chat,
                api_key=api_key,
                dataset=dataset,
                server_pid=server_pid,
            )
        else:
            assert plan_path is not None
            plan = stack.enter_context(Plan.open(plan_path))
            if not no_bound:
                bound = _bound_of(plan, cache_dir, threads, max_step_tokens)
            engine = load_engine(
                plan,
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
            stack.callback(engine.close)
            max_concurrency = min(max_concurrency, engine.max_seqs)
            encode = _encoder(plan, engine)
            dataset = (
                None
                if dataset_file is None
                else read_dataset(dataset_file, workload, encode, max_tokens=engine.max_seq_len)
            )
            if speculated.mode != "off" and not workload.is_open:
                measure = partial(bench_speculation, engine, progress=progress, dataset=dataset)
            else:
                measure = partial(run_bench, engine, progress=progress, dataset=dataset)

        def bench_once(load: Workload) -> BenchResult:
            found = repeat_bench(measure, load, repeats)
            return found if bound is None else replace(found, bound=bound(found))

        if ladder:
            result = run_ladder(
                bench_once, workload, attain=attain, rates=tried, concurrency=max_concurrency, progress=progress
            )
        else:
            result = bench_once(workload)
    report = json.dumps(result.to_json(), indent=2)
    if output is not None:
        write_output("the report", output, report + "\n")
    if as_json:
        typer.echo(report)
    else:
        Console().print(result.table())
    if not result.ok:
        raise typer.Exit(1)


def _encoder(plan: Plan, engine: Engine) -> Callable[[TrafficLine], list[int]]:
    """Return what turns a line of a file into token ids."""
    from optimc_runtime.chat_template import ChatTemplate

    template = ChatTemplate.from_plan(plan)
    return lambda line: line.encode(engine.tokenizer, template)


def _bound_of(plan: Plan, cache_dir: Path | None, threads: int | None, max_step_tokens: int | None) -> BoundOf | None:
    """Return what tells how near the machine's limits a result came; None if the machine cannot be measured now, or
    the plan runs on something else."""
    from optimc.measure.roofline.rates_store import try_rates
    from optimc.measure.roofline.row_bound import bound_of
    from optimc.measure.roofline.work import is_counted
    from optimc.storage import cache_folder

    if not is_counted(plan):
        return None
    rates = try_rates(cache_folder(cache_dir), threads)
    return None if rates is None else bound_of(plan, rates, max_step_tokens=max_step_tokens)
