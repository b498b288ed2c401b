"""`optimc serve`: a plan behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from optimc.cli import options
from optimc.errors import ConfigError, Fault

if TYPE_CHECKING:
    from optimc_runtime.policy import PolicyName
    from optimc_runtime.server.keys import KeyRing

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16
"""Enough to touch all weights and start all threads: steps as large as they come would delay the ready line more than
they spare the first long prompt."""


def serve(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="An engine.plan.", show_default=False)],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    model_name: Annotated[
        str | None, typer.Option("--model-name", help="Name clients use; the plan's by default.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="Jinja file to use instead of the plan's template.")
    ] = None,
    max_seqs: options.MaxSeqs = None,
    max_step_tokens: options.MaxStepTokens = None,
    kv_memory: options.KvMemory = None,
    threads: options.Threads = None,
    max_queued_requests: Annotated[
        int | None, typer.Option("--max-queued-requests", help="More waiting requests than this are refused (429).")
    ] = None,
    max_queued_tokens: Annotated[
        int | None, typer.Option("--max-queued-tokens", help="More waiting prompt tokens than this are refused (429).")
    ] = None,
    max_body_bytes: Annotated[
        str, typer.Option("--max-body-bytes", help="Larger request bodies are refused (413).")
    ] = "8MiB",
    slo_ttft_ms: Annotated[
        float | None,
        typer.Option("--slo-ttft-ms", help="Refuse (429) what would wait longer than this for its first token."),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="Who enters first: fcfs, shortest-prompt, priority (field `priority`, lower first). Waiting counts "
            "under each, so nobody starves; API keys take turns under each.",
        ),
    ] = "fcfs",
    ageing: Annotated[
        float, typer.Option("--ageing", help="Seconds of waiting that count as much as one level of priority.")
    ] = 10.0,
    max_gap_factor: Annotated[
        float,
        typer.Option(
            "--max-gap-factor",
            help="A prompt may slow running requests' steps to this many times their usual length; 0: no limit.",
        ),
    ] = 2.0,
    pin_prefix: Annotated[
        list[Path] | None,
        typer.Option(
            "--pin-prefix",
            metavar="FILE",
            help="Text, or messages in a .json, with which prompts begin: its K/V stays cached. May be repeated.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", help="Longer prompts are refused (400).", min=1)
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-output-tokens", help="A request may not ask for more (400), and gets no more if it does not.", min=1
        ),
    ] = None,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", help="Seconds until a request is given up (504).", min=0.001)
    ] = 600.0,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="Keys that may ask, one a line, name:key; those of $OPTIMC_API_KEYS (comma-separated) otherwise.",
        ),
    ] = None,
    insecure_no_key: Annotated[
        bool, typer.Option("--insecure-no-key", help="Listen beyond this machine without any key.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Pages of this origin (https://example.org, or *) may call from a browser. May be repeated.",
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no page at / and no dashboard.")] = False,
    log_traffic: Annotated[
        Path | None,
        typer.Option(
            "--log-traffic",
            metavar="FILE",
            help="Write every request with its prompt to this new file, one line of JSON each, readable by you alone: "
            "for optimc prefix-report, and to be replayed by optimc bench --dataset.",
            show_default=False,
        ),
    ] = None,
    log_traffic_ids: Annotated[
        bool,
        typer.Option(
            "--log-traffic-ids", help="With --log-traffic: the prompts' token ids too, as the model read them."
        ),
    ] = False,
    log_format: Annotated[
        str | None,
        typer.Option("--log-format", help="json or text; text on a terminal, else json.", show_default=False),
    ] = None,
    prefix_cache: options.PrefixCache = True,
    chunked_prefill: options.ChunkedPrefill = True,
    inflight_batching: options.InflightBatching = True,
    ignore_generation_config: Annotated[
        bool, typer.Option("--ignore-generation-config", help="Do not take sampling defaults from the checkpoint.")
    ] = False,
    allow_unknown_fields: Annotated[
        bool, typer.Option("--allow-unknown-fields", help="Log request fields nobody knows instead of refusing them.")
    ] = False,
    speculation: options.Speculation = None,
    no_speculation: options.NoSpeculation = False,
    lossy_acceptance: options.LossyAcceptance = None,
    typical_epsilon: options.TypicalEpsilon = None,
    typical_delta: options.TypicalDelta = None,
    drain_timeout: Annotated[
        int, typer.Option("--drain-timeout", help="Seconds that running requests have to finish after SIGTERM.", min=0)
    ] = 30,
    trust: options.Trust = False,
) -> None:
    """Serve a plan until SIGTERM or Ctrl-C. The ready line names the address; /metrics is for Prometheus.

    Tokens are guessed ahead (--speculation auto) where that pays, which is measured all the time.
    """
    from optimc.cli.allocator import limit_arenas, trimming
    from optimc.cli.log_format import use_log_format
    from optimc.cli.start_up import start_up

    limit_arenas()
    use_log_format(log_format)
    with start_up():
        from optimc.plan import Plan

        plan = Plan.open(plan_path)
        if not trust:
            plan.begin_verification()  # goes on while the rest is imported
        from optimc.cli.engine_options import describe_speculation, load_engine, speculation_options
        from optimc.cli.kv_listing import describe_kv
        from optimc.cli.pinned_prefixes import read_prefixes
        from optimc_runtime.chat_template import ChatTemplate
        from optimc_runtime.server import ServerOptions, check_address
        from optimc_runtime.server import serve as serve_engine
        from optimc_runtime.server.guard import check_exposure, check_origins
        from optimc_runtime.server.traffic_log import TrafficLog, check_new_file

        if log_traffic_ids and log_traffic is None:
            raise ConfigError("options", [Fault("--log-traffic-ids", "needs --log-traffic FILE")])
        if log_traffic is not None:
            check_new_file(log_traffic)
        keys = _read_keys(api_key_file)
        check_exposure(host, keys, allow=insecure_no_key)
        check_origins(cors_origin or ())
        template = ChatTemplate.from_plan(plan, source=_read_template(chat_template))
        defaults = {} if ignore_generation_config else dict(plan.manifest.generation_defaults)
        body_limit = options.bytes_option(max_body_bytes, "--max-body-bytes")
        assert body_limit is not None
        server_options = ServerOptions(
            max_body_bytes=body_limit,
            allow_unknown_fields=allow_unknown_fields,
            generation_defaults=defaults,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
            request_timeout_s=request_timeout,
            cors_origins=tuple(cors_origin or ()),
            show_page=not no_page,
        )
        prefixes = read_prefixes(pin_prefix or [])
        speculated = speculation_options(
            speculation,
            none=no_speculation,
            default="auto",
            lossy_acceptance=lossy_acceptance,
            typical_epsilon=typical_epsilon,
            typical_delta=typical_delta,
        )
        name = model_name or plan.manifest.name
        check_address(host, port)
        engine = load_engine(
            plan,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            kv_memory=kv_memory,
            threads=threads,
            prefix_cache=prefix_cache,
            chunked_prefill=chunked_prefill,
            inflight_batching=inflight_batching,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            policy=cast("PolicyName", policy),  # the engine's config lists the names there are
            ageing_s=ageing,
            gap_factor=max_gap_factor,
            ttft_slo_ms=slo_ttft_ms,
            speculation=speculated,
            trust=trust,
        )
        plan.close()
    traffic = None
    try:
        if log_traffic is not None:
            traffic = TrafficLog(log_traffic, ids=log_traffic_ids)
            logger.warning("%s will hold every prompt in plain text; keep it as you keep what users write", log_traffic)
        if defaults:
            shown = ", ".join(f"{key} {value}" for key, value in defaults.items())
            typer.echo(f"sampling defaults from the checkpoint: {shown} (--ignore-generation-config drops them)")
        if plan.manifest.kv.is_uncalibrated:
            typer.echo(f"KV cache: {describe_kv(plan.manifest.kv)}; answers may suffer where keys are large")
        if template is None:
            typer.echo("no chat template: /v1/chat/completions answers 400, /v1/completions works")
        engine.warm_up(max_tokens=_WARM_UP_TOKENS)
        for prefix in prefixes:
            blocks = prefix.pin(engine, template)
            typer.echo(f"pinned {prefix.path}: {blocks} KV blocks")
        guessing = describe_speculation(engine)
        with trimming():
            serve_engine(
                engine,
                model_name=name,
                chat_template=template,
                options=replace(server_options, traffic_log=traffic),
                keys=keys,
                host=host,
                port=port,
                drain_timeout_s=drain_timeout,
                on_ready=lambda url: print(f"{name} (speculation: {guessing}) ready on {url}", flush=True),
            )
    finally:
        engine.close()
        if traffic is not None:
            traffic.close()


def _read_keys(path: Path | None) -> KeyRing | None:
    """Return the keys of the file, or else those of the environment; None if there are none."""
    from optimc_runtime.server.keys import KeyRing

    if path is None:
        return KeyRing.from_environment(os.environ)
    keys = KeyRing.from_file(path)
    mode = path.stat().st_mode
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("%s can be read by others (mode %04o); chmod 600 it", path, stat.S_IMODE(mode))
    return keys


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("options", [Fault("--chat-template", f"{path}: {error}")]) from error
