"""A clock that only moves when everybody waits, a scripted engine, and a stub server: exact times, no sleeping."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from optimc.errors import OptimcError
from optimc.plan import FORMAT_VERSION, KvLayer, KvLayout, Limits, Manifest, ModelInfo, Source, TargetInfo, TokenIds
from optimc_runtime.request import RequestId, RequestOutput, SamplingParams, Timings, Usage


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the loop's clock to it."""

    loop: VirtualLoop

    def select(self, timeout=None):
        events = super().select(timeout if timeout is None else 0)
        if not events and timeout:
            self.loop.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class VirtualTime:
    """Runs coroutines on a VirtualLoop; `clock` is that loop's time."""

    def __init__(self) -> None:
        self._loop = VirtualLoop()

    def clock(self) -> float:
        return self._loop.now

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            return runner.run(coroutine)


@pytest.fixture
def virtual_time() -> VirtualTime:
    return VirtualTime()


def make_manifest(
    *, vocab_size: int = 384, max_seqs: int = 8, max_seq_len: int = 2048, recipe: dict[str, Any] | None = None
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        name="scripted",
        target=TargetInfo(backend="onnxruntime"),
        model=ModelInfo(architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=8, num_layers=1),
        limits=Limits(max_seq_len=max_seq_len, max_step_tokens=64, max_seqs=max_seqs, kv_memory_bytes=1 << 20),
        kv=KvLayout(block_size=16, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=8, window=0),)),
        tokens=TokenIds(bos=1, eos=(2,), pad=None),
        source=Source(
            model="somewhere/tiny",
            model_hash="a" * 64,
            recipe=recipe or {},
            recipe_hash="b" * 64,
            build_key="c" * 64,
            calibration_hash=None,
            tools={},
        ),
    )


@pytest.fixture(name="make_manifest")
def _make_manifest() -> Callable[..., Manifest]:
    return make_manifest


class ScriptedEngine:
    """Implements the engine interface on the running loop's time.

    `script(number, prompt_ids, max_tokens)` gives the increments of request `number`: (seconds after the one before,
    token count, finish reason or None). Raising an OptimcError refuses the request.
    """

    def __init__(self, script: Callable[[int, list[int], int], list[tuple[float, int, str | None]]], **manifest: Any):
        self._script = script
        self.manifest = make_manifest(**manifest)
        self.max_seq_len = self.manifest.limits.max_seq_len
        self.max_seqs = self.manifest.limits.max_seqs
        self.vocab_size = self.manifest.model.vocab_size
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.seen: set[tuple[int, ...]] = set()
        self.aborted: list[str] = []
        self.resets = 0
        self.closed = False
        self.claim_more = 0
        self.scores: Callable[[Sequence[int]], np.ndarray] | None = None

    def submit(self, prompt_ids, params, *, on_output) -> RequestId:
        number = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.params.append(params)
        steps = self._script(number, list(prompt_ids), params.max_tokens)
        cached = self._cached_tokens(prompt_ids)
        loop = asyncio.get_running_loop()
        request_id = RequestId(f"r{number}")
        delay, total = 0.0, 0
        for gap, count, finish in steps:
            delay, total = delay + gap, total + count
            claimed = total + (self.claim_more if finish else 0)
            usage = Usage(len(prompt_ids), claimed, cached)
            timings = Timings(arrival_s=0.0, scheduled_s=0.002)
            error = OptimcError("step failed") if finish == "error" else None
            output = RequestOutput(request_id, (7,) * count, "", None, finish, usage, timings, error)
            loop.call_later(delay, self._deliver, on_output, output)
        return request_id

    def _deliver(self, on_output, output: RequestOutput) -> None:
        if output.request_id not in self.aborted:
            on_output(output)

    def _cached_tokens(self, prompt_ids: Sequence[int]) -> int:
        """A prefix cache on blocks of 16, never the whole prompt."""
        ids = tuple(prompt_ids)
        blocks = [ids[: 16 * n] for n in range(1, (len(ids) - 1) // 16 + 1)]
        hit = max((len(block) for block in blocks if block in self.seen), default=0)
        self.seen.update(blocks)
        return hit

    def abort(self, request_id) -> None:
        self.aborted.append(request_id)

    def score(self, token_ids):
        assert self.scores is not None
        return self.scores(token_ids)

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        self.seen.clear()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def scripted_engine() -> type[ScriptedEngine]:
    return ScriptedEngine


def steady_script(ttft_s: float, tpot_s: float):
    """Every token its own increment."""

    def script(number: int, prompt_ids: list[int], max_tokens: int):
        gaps = [ttft_s] + [tpot_s] * (max_tokens - 1)
        return [(gap, 1, "length" if i == max_tokens - 1 else None) for i, gap in enumerate(gaps)]

    return script


@pytest.fixture(name="steady_script")
def _steady_script():
    return steady_script


class StubStream(httpx.AsyncByteStream):
    """A body sent piece by piece, each after its delay on the loop's clock; an exception as a piece is raised."""

    def __init__(self, pieces: Sequence[tuple[float, bytes | Exception]]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, piece in self._pieces:
            await asyncio.sleep(delay_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text_event(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def usage_event(prompt: int, output: int, cached: int | None = 0) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": output, **details})


DONE = b"data: [DONE]\n\n"


class StubServer:
    """An OpenAI-compatible server behind httpx.MockTransport.

    `answer(number, body)` gives (status, pieces) for completion number `number`, counted without the length probes.
    """

    def __init__(self, answer: Callable[[int, dict[str, Any]], tuple[int, list[tuple[float, bytes | Exception]]]]):
        self._answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.probes = 0
        self.takes_ids = True
        self.words_per_token = 1.0

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self._handle)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "stub"}]})
        body = json.loads(request.content)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        if isinstance(prompt, list) and not self.takes_ids:
            return httpx.Response(400, json={"error": {"message": "prompt must be a string"}})
        if body["max_tokens"] == 1 and self.probes < 2 + (not self.takes_ids):
            self.probes += 1
            pieces = [(0.01, text_event("x", "length")), (0.0, usage_event(self.count(prompt), 1)), (0.0, DONE)]
            return httpx.Response(200, stream=StubStream(pieces))
        self.bodies.append(body)
        self.paths.append(request.url.path)
        status, pieces = self._answer(len(self.bodies) - 1, body)
        return httpx.Response(status, stream=StubStream(pieces))

    def count(self, prompt: list[int] | str) -> int:
        return len(prompt) if isinstance(prompt, list) else 3 + round(len(prompt.split()) / self.words_per_token)


class Stub:
    """What tests of the HTTP driver build their streams from."""

    Server = StubServer
    event = staticmethod(event)
    text = staticmethod(text_event)
    usage = staticmethod(usage_event)
    done = DONE


@pytest.fixture
def stub() -> type[Stub]:
    return Stub


@pytest.fixture(scope="session")
def tiny_model():
    """A random two-layer Llama with a tied head, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_model):
    """The tiny model as a loaded checkpoint: each parameter once, the head under the embedding's name."""
    from optimc_passes.checkpoint import Checkpoint, TokenizerAssets
    from optimc_passes.weights import Dense, WeightStore

    weights = {name: Dense.of(p.detach().numpy().copy()) for name, p in tiny_model.named_parameters()}
    return Checkpoint(
        source="tiny",
        digest="d" * 64,
        config=tiny_model.config,
        weights=WeightStore(weights),
        tokenizer=TokenizerAssets(None, None),
        bos=1,
        eos=(2,),
        pad=None,
    )


@pytest.fixture(scope="session")
def word_tokenizer_json() -> bytes:
    """A tokenizer of three ids: "the", "a", and everything else."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"the": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.to_str().encode()
