"""An engine that says what it is told to, and a tokenizer and a template to go with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from optimc.errors import EngineError, OptimcError, OverloadedError, RequestError
from optimc_runtime.request import (
    FinishReason,
    RequestId,
    RequestOutput,
    SamplingParams,
    Terms,
    Timings,
    TokenLogprob,
    Usage,
)
from optimc_runtime.stats import EngineStats, SpeculationStats

EOS = 3
FIRST_BYTE = 16
VOCAB = FIRST_BYTE + 256


class ByteTokenizer:
    """Token id 16 + b is the byte b; ids below are special: 1 begins a turn, 2 ends it, 3 is EOS."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [FIRST_BYTE + byte for byte in text.encode()]

    @property
    def pieces(self) -> ByteTokenizer:
        return self

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id - FIRST_BYTE]) if token_id >= FIRST_BYTE else f"<{token_id}>".encode()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        shown = (token_id for token_id in ids if token_id >= FIRST_BYTE or not skip_special_tokens)
        return b"".join(map(self.bytes_of, shown)).decode(errors="replace")

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(FIRST_BYTE))

    def token_id(self, token: str) -> int | None:
        return next((i for i in range(VOCAB) if self.bytes_of(i) == token.encode()), None)


class TurnTemplate:
    """Every message becomes: 1, the role's first letter, the content, 2."""

    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    supports_tools = False

    def __init__(self) -> None:
        self.seen: list[Sequence[Mapping[str, Any]]] = []
        self.extra: dict[str, Any] = {}

    def encode(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
        self.seen.append(messages)
        self.extra = extra
        ids: list[int] = []
        for message in messages:
            ids += [1, *tokenizer.encode(message["role"][0] + message["content"]), 2]
        return [*ids, 1]


@dataclass(frozen=True)
class Script:
    """What the engine answers. `pieces` are texts of one increment each, one token per byte."""

    pieces: Sequence[str] = ("Hello", " wor", "ld")
    finish: FinishReason = "stop"
    eos: bool = True
    """End with an EOS token, which has no text."""
    held_back: str = ""
    """Text of the last tokens that a stop string took away."""
    delay_s: float = 0.0
    fail_after: int | None = None
    """Increments before the request ends with `error`."""
    error: OptimcError = field(default_factory=lambda: EngineError("step 3 failed: injected"))


@dataclass(frozen=True)
class StubGrammar:
    """Stands for a compiled grammar; the scripted engine does not keep to it."""

    spec: Any


@dataclass
class Submitted:
    prompt: list[int]
    params: SamplingParams
    cache_salt: str
    request_id: RequestId
    terms: Terms = field(default_factory=Terms)
    grammar: Any = None
    aborted: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    sent_tokens: int = 0


class ScriptedEngine:
    """Answers each request from a thread of its own, as `script` (or `script_for(prompt, nth)`) says."""

    def __init__(self) -> None:
        self.max_seq_len = 4096
        self.max_request_tokens = 4096
        self.max_seqs = 16
        self.vocab_size = VOCAB
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.reset()

    def max_unfinished(self, tenant: str) -> int:
        return 10 if tenant == "small" else 10_000

    def reset(self) -> None:
        self.script = Script()
        self.script_for: Callable[[list[int], int], Script] | None = None
        self.healthy = True
        self.stalled = 0.0
        """Seconds without a step, as `stalled_s` reports them."""
        self.compiled: list[Any] = []
        self.compile_s = 0.0
        """How long a grammar takes to compile."""
        self.grammar_error: RequestError | None = None
        self.capacity: int | None = None
        self.submitted: list[Submitted] = []
        self.refuse: OptimcError | None = None
        self.submit_raises: Exception | None = None
        self.speculation: SpeculationStats | None = None
        self._lock = threading.Lock()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        on_output: Callable[[RequestOutput], None],
        request_id: str | None = None,
        cache_salt: str = "",
        terms: Terms = Terms(),  # noqa: B008 - frozen
        grammar: Any = None,
    ) -> RequestId:
        if self.submit_raises is not None:
            raise self.submit_raises
        if self.refuse is not None:
            raise self.refuse
        if len(prompt_ids) + (1 if params.max_tokens is None else params.max_tokens) > self.max_seq_len:
            raise RequestError(f"{len(prompt_ids)} prompt tokens do not fit", code="context_length_exceeded")
        with self._lock:
            if self.capacity is not None and len(self.live()) >= self.capacity:
                raise OverloadedError(f"{self.capacity} requests are waiting already", retry_after_s=0.2)
            assert request_id is not None
            entry = Submitted(list(prompt_ids), params, cache_salt, RequestId(request_id), terms, grammar)
            self.submitted.append(entry)
            script = self.script_for(entry.prompt, len(self.submitted) - 1) if self.script_for else self.script
        threading.Thread(target=self._play, args=(entry, script, on_output), daemon=True).start()
        return entry.request_id

    def abort(self, request_id: RequestId) -> None:
        for entry in self.submitted:
            if entry.request_id == request_id:
                entry.aborted.set()

    def live(self) -> list[Submitted]:
        return [entry for entry in self.submitted if not entry.ended.is_set()]

    def stats(self) -> EngineStats:
        done = sum(entry.sent_tokens for entry in self.submitted)
        return EngineStats(
            running=len(self.live()), waiting=2, blocks_total=10, blocks_free=4, blocks_cached=1, blocks_used=5,
            steps=7, failed_steps=1, prompt_tokens=11, output_tokens=done, prefix_queried_tokens=100,
            prefix_hit_tokens=40, preemptions=3, finished={}, last_step_s=0.25, schedule_s=1.0, execute_s=2.0,
            sample_s=3.0, commit_s=4.0, draft_s=5.0, speculation=self.speculation,
        )  # fmt: skip

    def compile_grammar(self, spec: Any) -> StubGrammar:
        time.sleep(self.compile_s)
        if self.grammar_error is not None:
            raise self.grammar_error
        self.compiled.append(spec)
        return StubGrammar(spec)

    def stalled_s(self) -> float:
        return self.stalled

    def is_healthy(self, threshold_s: float) -> bool:
        return self.healthy and self.stalled <= threshold_s

    def _play(self, entry: Submitted, script: Script, on_output: Callable[[RequestOutput], None]) -> None:
        start = time.monotonic()
        timings = Timings(arrival_s=start, scheduled_s=start)
        told_prompt = None
        if entry.params.prompt_logprobs:
            assert entry.params.logprobs is not None
            tops = tuple((40 + rank, -2.0 - rank) for rank in range(entry.params.logprobs))
            told_prompt = (None, *(TokenLogprob(token_id, -0.25, tops) for token_id in entry.prompt[1:]))
        if entry.params.max_tokens == 0:
            entry.ended.set()
            on_output(self._output(entry, (), "", timings, "length")._replace(prompt_logprobs=told_prompt))
            return
        increments = [(piece, piece.encode()) for piece in script.pieces]
        last = script.held_back.encode()
        for number, (text, data) in enumerate([*increments, ("", last)]):
            final = number == len(increments)
            if entry.aborted.wait(script.delay_s):
                entry.ended.set()
                on_output(self._output(entry, (), "", timings, "abort"))
                return
            if number == script.fail_after:
                entry.ended.set()
                on_output(self._output(entry, (), "", timings, "error")._replace(error=script.error))
                return
            ids = tuple(FIRST_BYTE + byte for byte in data)
            if final and script.eos:
                ids = (*ids, EOS)
            entry.sent_tokens += len(ids)
            now = time.monotonic()
            timings = replace(timings, first_token_s=timings.first_token_s or now, finished_s=now if final else None)
            if final:
                entry.ended.set()
            output = self._output(entry, ids, text, timings, script.finish if final else None)
            on_output(output._replace(prompt_logprobs=told_prompt))
            told_prompt = None

    def _output(
        self, entry: Submitted, ids: tuple[int, ...], text: str, timings: Timings, finish: FinishReason | None
    ) -> RequestOutput:
        wanted = entry.params.logprobs
        logprobs = None
        if wanted is not None:
            tops = tuple((40 + rank, -1.0 - rank) for rank in range(wanted))
            logprobs = tuple(TokenLogprob(token_id, -0.5, tops) for token_id in ids)
        usage = Usage(len(entry.prompt), entry.sent_tokens, cached_tokens=min(4, len(entry.prompt) - 1))
        return RequestOutput(entry.request_id, ids, text, logprobs, finish, usage, timings)
