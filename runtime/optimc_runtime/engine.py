"""The engine: requests in from any thread, answers out from its own.

`submit` and `abort` only leave a note and wake the engine's thread (`EngineThread`). `generate`, `stream` and `score`
start it if nobody has.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import queue
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from optimc.errors import RequestError
from optimc.plan import Manifest, Plan
from optimc_runtime.active_request import ActiveRequest, OnHidden, OnLogits
from optimc_runtime.admission import check_prompt, check_speculation, check_stops, output_limit
from optimc_runtime.block_pool import BlockPool
from optimc_runtime.chunk_budget import ChunkBudget
from optimc_runtime.config import EngineConfig, StepLimits
from optimc_runtime.engine_thread import EngineThread
from optimc_runtime.executor.base import Executor
from optimc_runtime.executor.load import load_executor
from optimc_runtime.generate import Batch
from optimc_runtime.last_output import LastOutput
from optimc_runtime.output_text import OutputText, special_stop_ids
from optimc_runtime.pins import check_prefix
from optimc_runtime.prefix_cache import BlockHash, Extras, PrefixCache, chain_hash
from optimc_runtime.prompt_logprobs import PromptLogprobs
from optimc_runtime.queue_limits import tenant_share
from optimc_runtime.request import Generation, RequestId, RequestOutput, SamplingParams, Terms
from optimc_runtime.sampler import SamplingState
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence as TokenSequence
from optimc_runtime.speculate.build_speculator import DraftModel, build_speculator, load_draft
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.speculate.profile_steps import profile_steps
from optimc_runtime.speculate.speculator import ProposingSpeculator
from optimc_runtime.speculate.tree import Speculator
from optimc_runtime.stats import EngineStats
from optimc_runtime.structured.compiler import GrammarCompiler
from optimc_runtime.structured.grammar import Grammar
from optimc_runtime.structured.grammar_spec import GrammarSpec
from optimc_runtime.tokenizer import Tokenizer

_NO_TERMS = Terms()

_log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
"""Text, encoded with the tokenizer's own settings, or token ids."""


class Engine:
    """Serves one plan on one executor, which it owns and closes.

    Raises ConfigError if an option exceeds what the plan was built for. Usable as a context manager: `start`, and
    `close` without draining. `speculator` replaces the one that the options ask for.
    """

    def __init__(
        self,
        executor: Executor,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        config: EngineConfig | None = None,
        *,
        block_hash: BlockHash = chain_hash,
        speculator: Speculator | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        self.manifest = manifest
        self.tokenizer = tokenizer
        limits = self.config.resolve(manifest, executor.pool)
        if limits.max_request_tokens < limits.max_seq_len:
            _log.warning(
                "the KV pool holds %d tokens: requests are limited to that, not to max_seq_len %d",
                limits.max_request_tokens,
                limits.max_seq_len,
            )
        pool = BlockPool(limits.num_blocks, limits.block_size)
        engine_id = hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()
        self.scheduler = Scheduler(
            limits,
            pool,
            PrefixCache(pool, engine_id, block_hash) if self.config.prefix_cache else None,
            chunked_prefill=self.config.chunked_prefill,
            inflight_batching=self.config.inflight_batching,
            max_overtakes=self.config.max_overtakes,
            policy=self.config.policy,
            ageing_s=self.config.ageing_s,
            chunk_budget=ChunkBudget(self.config.gap_factor) if self.config.gap_factor else None,
        )
        self._executor = executor
        if speculator is None:
            speculator = build_speculator(executor, manifest, self.config.speculation, draft)
        self._speculator = speculator
        self._worker = EngineThread(executor, self.scheduler, self.config, speculator)
        self._loop = self._worker.loop
        self._grammars = (
            None if tokenizer is None else GrammarCompiler(tokenizer, self.vocab_size, tuple(manifest.tokens.eos))
        )
        self._closing = threading.Lock()
        self._is_released = False
        self._order = itertools.count()

    @classmethod
    def load(cls, plan: Plan | Path | str, config: EngineConfig | None = None, *, trust: bool = False) -> Engine:
        """Make the executor of a plan, opened or to be opened. `trust` skips checking every tensor's SHA-256.

        Raises PlanError if the plan cannot be used here, ConfigError if an option exceeds what it was built for.
        """
        config = EngineConfig() if config is None else config
        plan = plan if isinstance(plan, Plan) else Plan.open(plan)
        if not trust:
            plan.begin_verification()
        try:
            tokenizer = Tokenizer.from_plan(plan)
        finally:
            if not trust:
                plan.verify()  # what is damaged may have failed to load: this says why
        executor = load_executor(plan, kv_memory_bytes=config.kv_memory_bytes, threads=config.threads)
        draft = None
        try:
            draft = load_draft(plan, config, trust=trust)
            return cls(executor, plan.manifest, tokenizer, config, draft=draft)
        except BaseException:
            executor.close()
            if draft is not None:
                draft.executor.close()
            raise

    @property
    def limits(self) -> StepLimits:
        """What no step and no request may exceed now."""
        return self.scheduler.limits

    @property
    def max_seq_len(self) -> int:
        """Longest sequence in tokens, prompt plus output."""
        return self.limits.max_seq_len

    @property
    def max_request_tokens(self) -> int:
        """Longest sequence in tokens that the KV pool can hold; `max_seq_len` if it holds that."""
        return self.limits.max_request_tokens

    @property
    def max_seqs(self) -> int:
        """Most requests that run at once."""
        return self.limits.max_running

    def max_unfinished(self, tenant: str = "") -> int:
        """Return how many requests of a tenant are taken in at once while nobody else has any: those that run, and
        those that wait."""
        most = self.config.max_queued_requests
        return self.max_seqs + (tenant_share(most) if tenant else most)

    @property
    def vocab_size(self) -> int:
        """Number of token ids V."""
        return self.manifest.model.vocab_size

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the engine's thread; nothing happens if it runs. Raises EngineError after `close`."""
        self._worker.start()

    def close(self, drain: bool = False, timeout_s: float | None = None) -> None:
        """Stop and release the executor. With `drain`, first finish what was accepted (at most for `timeout_s`); what
        is left is aborted. Nothing is accepted from now on. Idempotent."""
        self._worker.stop(drain=drain, timeout_s=timeout_s)
        with self._closing:
            was_released, self._is_released = self._is_released, True
        if not was_released:
            try:
                if self._speculator is not None:
                    self._speculator.close()
            finally:
                self._executor.close()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[RequestOutput], None],
        request_id: str | None = None,
        cache_salt: str = "",
        terms: Terms = _NO_TERMS,
        grammar: Grammar | None = None,
        on_hidden: OnHidden | None = None,
    ) -> RequestId:
        """Queue a request. `on_output` is called from the engine's thread for every token, or for several that one
        step brought, with finish_reason set in the last call; if it raises, the request ends. `on_hidden` is called
        before it with the hidden states [m, d] its m tokens were sampled from, if the plan was lowered to give them.
        Requests share cached prefixes only under the same `cache_salt`. `terms` say who is to get it and how soon;
        with a `grammar`, from `compile_grammar`, the answer keeps to it.

        Raises RequestError if the request can never be served, OverloadedError if the queue is full, EngineError if
        the engine is closed.
        """
        prompt = check_prompt(prompt_ids, self.vocab_size, self.limits, chunked_prefill=self.config.chunked_prefill)
        most = output_limit(len(prompt), params, self.limits)
        has_tokenizer, has_grammar = self.tokenizer is not None, grammar is not None
        check_stops(params, self.vocab_size, has_tokenizer=has_tokenizer, has_grammar=has_grammar)
        if params.speculation is not None:
            check_speculation(params.speculation, None if self._speculator is None else self._speculator.stats())
        stop_ids = frozenset(params.stop_token_ids) | special_stop_ids(self.tokenizer, params.stop)
        if not params.ignore_eos:
            stop_ids |= frozenset(self.manifest.tokens.eos)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        # Every position of a scored prompt is computed, so it takes nothing from the prefix cache.
        scored = PromptLogprobs(prompt, params.logprobs or 0) if params.prompt_logprobs else None
        sequence = TokenSequence(
            RequestId(request_id or uuid.uuid4().hex),
            next(self._order),
            prompt,
            most,
            extras=None if scored is not None else _extras(cache_salt),
            all_logits=scored is not None,
        )
        sequence.proposer = params.speculation
        sequence.tenant, sequence.priority, sequence.is_follower = terms.tenant, terms.priority, terms.is_follower
        sequence.arrived_s = time.monotonic()
        request = ActiveRequest(
            sequence,
            on_output,
            sequence.arrived_s,
            sampling=SamplingState(params, prompt, stop_ids, self.vocab_size, seed),
            stop_ids=stop_ids,
            text=OutputText(self.tokenizer, params),
            on_logits=None if scored is None else scored.take,
            on_hidden=on_hidden,
            grammar=None if grammar is None else grammar.start(),
            prompt_logprobs=scored,
        )
        self._worker.enqueue(request)
        return sequence.request_id

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Return what keeps answers to `spec`. Takes milliseconds, the first time longer; any thread may call it.

        Raises RequestError if there is no such grammar, or no tokenizer to tell which text tokens stand for.
        """
        if self._grammars is None:
            raise RequestError(f"{spec.param} needs a tokenizer, and the plan has none", param=spec.param)
        return self._grammars.compile(spec)

    def abort(self, request_id: RequestId) -> None:
        """End a request in whatever state it is, within one step; its last output has finish_reason "abort". Nothing
        happens if it is unknown, finished or aborted already."""
        self._worker.abort(request_id)

    def stream(self, prompt: Prompt, params: SamplingParams) -> Iterator[RequestOutput]:
        """Yield a request's outputs as they come; submitted when first iterated, aborted if left early.

        Raises what `submit` raises, and the request's error if it fails.
        """
        self.start()
        arrived: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        request_id = self.submit(self._encode(prompt), params, on_output=arrived.put)
        try:
            while True:
                output = arrived.get()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Answer all prompts, any number of them: when the queue is full, this waits instead of failing.

        Raises RequestError for the first prompt that can never be served, and the error of the first that fails; the
        others are aborted.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} params")
        self.start()
        return Batch(self).run([self._encode(prompt) for prompt in prompts], each)

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits [T, V] at every position of a text, as served: row t predicts token t+1. Raises as
        `score_stream`, which does not hold them all."""
        logits = np.empty((len(token_ids), self.vocab_size), np.float32)

        def keep(start: int, rows: NDArray[np.float32]) -> None:
            logits[start : start + len(rows)] = rows

        self.score_stream(token_ids, keep)
        return logits

    def score_stream(self, token_ids: Sequence[int], on_logits: OnLogits) -> None:
        """Call `on_logits(start, logits [n, V])` for consecutive runs of positions, in order, each position once.

        The text goes through the scheduler like any prompt, in chunks, among other requests; the prefix cache is
        neither asked nor told. `on_logits` is called from the engine's thread and must copy what it keeps. Raises
        what `submit` raises, EngineError if a step fails, and whatever `on_logits` raises.
        """
        prompt = check_prompt(token_ids, self.vocab_size, self.limits, chunked_prefill=self.config.chunked_prefill)
        self.start()
        last = LastOutput(on_logits)
        sequence = TokenSequence(
            RequestId(uuid.uuid4().hex), next(self._order), prompt, max_output_tokens=0, all_logits=True
        )
        self._worker.enqueue(ActiveRequest(sequence, last.put, time.monotonic(), on_logits=last.take))
        try:
            last.wait()
        finally:
            self.abort(sequence.request_id)

    def step(self) -> bool:
        """Run one step on the caller's thread; return whether work is left. Only before `start`: for tools and tests
        that need to decide when things happen."""
        assert self._worker.thread is None, "the engine's thread is running"
        return self._worker.turn()

    def warm_up(self, max_tokens: int | None = None) -> None:
        """Run the largest prefill and decode steps once, of at most `max_tokens` tokens, so that the first request does
        not pay for them. Writes only blocks that are free now; the prefix cache and all figures stay as they are.
        Raises what the executor raises."""
        self._worker.call(lambda: self._loop.warm_up(max_tokens))

    def profile_steps(self, budget_s: float = 0.15) -> None:
        """Measure for about `budget_s` how long steps take, so that speculation knows from the start what guesses cost;
        without it, it learns that from steps. Writes only free blocks. Raises what the executor raises."""
        speculator = self._speculator
        if isinstance(speculator, ProposingSpeculator):
            self._worker.call(lambda: self._profile_steps(speculator, budget_s))

    @property
    def step_costs(self) -> CostModel | None:
        """What steps are believed to take; None without speculation."""
        return self._speculator.cost if isinstance(self._speculator, ProposingSpeculator) else None

    def stats(self) -> EngineStats:
        """Return a snapshot of load and totals; requests the engine's thread has not taken in yet count as waiting."""
        return self._worker.stats()

    def pin_prefix(self, token_ids: Sequence[int], cache_salt: str = "") -> int:
        """Compute the K/V of a prefix that many prompts begin with and keep it for good; return how many blocks hold
        it. Requests have so much less room from then on, so this is for before there are any.

        Raises ConfigError if the prefix cannot be pinned, EngineError if a request came meanwhile or a step fails.
        """
        check_prefix(len(token_ids), self.limits, is_cached=self.scheduler.cache is not None)
        self.start()
        last = LastOutput()
        self.submit(token_ids, SamplingParams(max_tokens=0), on_output=last.put, cache_salt=cache_salt)
        last.wait()
        tokens = np.asarray(token_ids, np.int64)
        self._worker.call(lambda: self.scheduler.pin(tokens, _extras(cache_salt)))
        return len(tokens) // self.limits.block_size

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, pinned ones too; returns when it is done."""
        self._worker.call(self.scheduler.reset_prefix_cache)

    def stalled_s(self) -> float:
        """Return the seconds since the last step ended, 0 while there is nothing to do; infinity if the engine is
        broken."""
        return self._worker.stalled_s()

    def is_healthy(self, threshold_s: float) -> bool:
        """Return whether the engine accepts requests and, if it has any, finished a step in the last `threshold_s`."""
        return self._worker.is_healthy(threshold_s)

    def _profile_steps(self, speculator: ProposingSpeculator, budget_s: float) -> None:
        cost = profile_steps(self._executor, self.scheduler.pool, self.limits, budget_s)
        if cost is not None:
            speculator.cost = cost

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer, and the plan has none; give token ids", param="prompt")
        return self.tokenizer.encode(prompt)


def _extras(cache_salt: str) -> Extras:
    return (("salt", cache_salt),) if cache_salt else ()
