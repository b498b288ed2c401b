"""A scripted executor: its logits are a hash of the tokens it finds in its pool through the block table.

Any block that is wrong, stale, shared too early or reused too soon changes the answer or trips an assertion, as real
attention over a wrong K/V history would, at microseconds per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from optimc.errors import EngineError
from optimc.plan import FORMAT_VERSION, KvLayer, KvLayout, Limits, Manifest, ModelInfo, Source, TargetInfo, TokenIds
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import KvPoolInfo, StepPlan, StepResult
from optimc_runtime.request import SamplingParams
from optimc_runtime.sampler import SamplingState, sample
from optimc_runtime.tokenizer import Tokenizer

from .scheduler_rig import Rig

POISON = -1


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def reference_logits(tokens, vocab_size: int) -> np.ndarray:
    """[T, V]: at each position a function of all tokens up to it and of their places."""
    return _logits_at(np.asarray(tokens, np.int64), np.arange(len(tokens)), vocab_size)


_PLACES = _mix(np.arange(1, 4097, dtype=np.uint64))
_WORDS = np.arange(1, 4097, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)


def _logits_at(tokens: np.ndarray, positions: np.ndarray, vocab_size: int) -> np.ndarray:
    mixed = _mix(tokens.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _PLACES[: len(tokens)])
    context = np.cumsum(mixed, dtype=np.uint64)[positions]
    words = _mix(context[:, None] + _WORDS[:vocab_size])
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(12 / 2**24) - np.float32(6)


@dataclass
class ScriptedExecutor:
    num_blocks: int
    block_size: int
    vocab_size: int
    limits: Limits | None = None
    before_step: Callable[[StepPlan], None] | None = None
    after_step: Callable[[StepPlan], None] | None = None
    script: dict[int, int] = field(default_factory=dict)
    """Position to the token that wins after it, whatever the history; the hash decides elsewhere."""
    shapes: list[tuple[int, int, int]] = field(default_factory=list)
    hidden_size: int = 0
    """With hidden states: row r of a step is filled with the token and position it is of."""
    num_moves: int = 0
    heads: None = None
    closed: bool = False

    def __post_init__(self) -> None:
        self.tokens = np.full(self.num_blocks * self.block_size, POISON, np.int64)
        self.positions = np.full(self.num_blocks * self.block_size, POISON, np.int64)

    @property
    def pool(self) -> KvPoolInfo:
        return KvPoolInfo(self.num_blocks, self.block_size, bytes_per_block=1024)

    def poison(self, blocks) -> None:
        for block in blocks:
            self.tokens[block * self.block_size : (block + 1) * self.block_size] = POISON
            self.positions[block * self.block_size : (block + 1) * self.block_size] = POISON

    def execute(self, plan: StepPlan) -> StepResult:
        if self.before_step is not None:
            self.before_step(plan)
        self._check(plan)
        self.tokens[plan.slots] = plan.tokens
        self.positions[plan.slots] = plan.positions
        logits = np.empty((len(plan.logits_rows), self.vocab_size), np.float32)
        owner = np.searchsorted(plan.query_start, plan.logits_rows, side="right") - 1
        for sequence in sorted(set(owner.tolist())):
            mine = np.flatnonzero(owner == sequence)
            if plan.tree_mask is not None:
                logits[mine] = self._logits_of_tree(plan, sequence, plan.logits_rows[mine])
                continue
            at = plan.positions[plan.logits_rows[mine]]
            seen = np.arange(at[-1] + 1)
            slots = plan.block_table[sequence, seen // self.block_size] * self.block_size + seen % self.block_size
            assert (self.positions[slots] == seen).all(), "a token's K/V is not where the block table says"
            history = self.tokens[slots]
            assert (history != POISON).all(), "unwritten K/V is read"
            logits[mine] = _logits_at(history, at, self.vocab_size)
        for row, position in enumerate(plan.positions[plan.logits_rows].tolist()):
            if position in self.script:
                logits[row, self.script[position]] = 100
        self.shapes.append((len(plan.tokens), len(plan.context_len), len(plan.logits_rows)))
        if self.after_step is not None:
            self.after_step(plan)
        return StepResult(logits, self._hidden(plan) if self.hidden_size else None)

    def _hidden(self, plan: StepPlan) -> np.ndarray:
        hidden = np.zeros((len(plan.logits_rows), self.hidden_size), np.float32)
        hidden[:, 0] = plan.tokens[plan.logits_rows]
        hidden[:, 1] = plan.positions[plan.logits_rows]
        return hidden

    def _logits_of_tree(self, plan: StepPlan, sequence: int, rows: np.ndarray) -> np.ndarray:
        """Each row's history is its sequence's context and the queries its mask shows."""
        seen = np.arange(plan.context_len[sequence])
        slots = plan.block_table[sequence, seen // self.block_size] * self.block_size + seen % self.block_size
        assert (self.positions[slots] == seen).all(), "a token's K/V is not where the block table says"
        first, end = plan.query_start[sequence : sequence + 2]
        logits = []
        for row in rows:
            visible = plan.slots[first:end][plan.tree_mask[row, : end - first]]
            assert (self.positions[visible] == len(seen) + np.arange(len(visible))).all(), "no path from the root"
            history = np.concatenate([self.tokens[slots], self.tokens[visible]])
            assert (history != POISON).all(), "unwritten K/V is read"
            logits.append(_logits_at(history, np.array([len(history) - 1]), self.vocab_size)[0])
        return np.array(logits)

    def draft(self, hidden, tokens, top):
        raise EngineError("the scripted model has no heads")

    def move(self, src_slots, dst_slots) -> None:
        assert src_slots.dtype == dst_slots.dtype == np.int64
        assert len(set(dst_slots.tolist())) == len(dst_slots), "two rows move to one slot"
        self.num_moves += 1
        self.tokens[dst_slots] = self.tokens[src_slots]
        self.positions[dst_slots] = self.positions[src_slots]

    def close(self) -> None:
        self.closed = True

    def _check(self, plan: StepPlan) -> None:
        assert plan.tokens.dtype == plan.positions.dtype == plan.slots.dtype == plan.logits_rows.dtype == np.int64
        assert plan.query_start.dtype == plan.context_len.dtype == plan.block_table.dtype == np.int32
        counts = np.diff(plan.query_start)
        total = int(plan.query_start[-1])
        assert plan.query_start[0] == 0
        assert (counts > 0).all()
        assert total == len(plan.tokens) == len(plan.positions) == len(plan.slots)
        assert len(set(plan.slots.tolist())) == total, "two tokens share a slot"
        assert (np.diff(plan.logits_rows) > 0).all()
        owner = np.repeat(np.arange(len(counts)), counts)
        expected = np.arange(total) + (plan.context_len - plan.query_start[:-1])[owner]
        if plan.tree_mask is None:
            assert (plan.positions == expected).all()
        else:
            self._check_mask(plan, counts, owner)
        blocks = plan.block_table[owner, expected // self.block_size]
        assert (plan.slots == blocks * self.block_size + expected % self.block_size).all()
        if self.limits is not None:
            assert total <= self.limits.max_step_tokens
            assert len(counts) <= self.limits.max_seqs
            assert (plan.context_len + counts).max() <= self.limits.max_seq_len

    def _check_mask(self, plan: StepPlan, counts: np.ndarray, owner: np.ndarray) -> None:
        assert plan.tree_mask.dtype == np.bool_
        assert plan.tree_mask.shape == (len(plan.tokens), counts.max())
        query = np.arange(len(plan.tokens)) - plan.query_start[owner]
        assert plan.tree_mask[np.arange(len(query)), query].all(), "a query sees itself"
        assert plan.tree_mask[:, 0].all(), "a query sees the root"
        assert not (plan.tree_mask & (np.arange(counts.max()) > query[:, None])).any(), "a query sees what follows"
        assert (plan.positions == plan.context_len[owner] + plan.tree_mask.sum(axis=1) - 1).all()


def make_manifest(
    *,
    vocab_size: int = 64,
    block_size: int = 4,
    max_seq_len: int = 64,
    max_step_tokens: int = 8,
    max_seqs: int = 8,
    eos: tuple[int, ...] = (),
) -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        name="scripted",
        target=TargetInfo(backend="scripted"),
        model=ModelInfo(architecture="scripted", vocab_size=vocab_size, hidden_size=1, num_layers=1),
        limits=Limits(
            max_seq_len=max_seq_len, max_step_tokens=max_step_tokens, max_seqs=max_seqs, kv_memory_bytes=1 << 20
        ),
        kv=KvLayout(block_size=block_size, dtype="float32", layers=(KvLayer(num_kv_heads=1, head_dim=1, window=0),)),
        tokens=TokenIds(bos=None, eos=eos, pad=None),
        source=Source(
            model="none",
            model_hash="",
            recipe={},
            recipe_hash="",
            build_key="",
            calibration_hash=None,
            tools={},
        ),
    )


def make_byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes themselves; 256 is the control token <end>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = Backend(models.BPE(vocab={chars[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend.to_str().encode())


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    return make_byte_tokenizer()


@pytest.fixture
def make_engine(scripted):
    """Make an engine on a scripted executor, whose fresh blocks are poisoned; all are closed in the end."""
    engines = []

    def make(
        config: EngineConfig | None = None,
        *,
        num_blocks=32,
        vocab_size=64,
        tokenizer=None,
        poison=True,
        speculator=None,
        script=None,
        gap_factor=0,
        **options,
    ):
        # With a gap factor the size of chunks would depend on time.
        config = replace(config or EngineConfig(), gap_factor=gap_factor)
        given = {"block_hash": options.pop("block_hash")} if "block_hash" in options else {}
        if speculator is not None:
            given["speculator"] = speculator
        manifest = scripted.manifest(vocab_size=vocab_size, **options)
        executor = scripted.Executor(num_blocks, manifest.kv.block_size, vocab_size, manifest.limits)
        executor.script = script or {}
        engine = Engine(executor, manifest, tokenizer, config, **given)
        engine.executor = executor
        if poison:
            scripted.poison_on_allocate(engine.scheduler.pool, executor)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if engine.executor.before_step is not None:
            engine.executor.before_step = None
        engine.close()


@pytest.fixture
def make_talker(make_engine, byte_tokenizer):
    """Make an engine that answers a one-token prompt with `text`, byte by byte."""

    def make(text: str):
        engine = make_engine(vocab_size=257, tokenizer=byte_tokenizer, max_seq_len=120)
        engine.executor.script = dict(enumerate(text.encode()))
        return engine

    return make


@pytest.fixture
def rig(scripted):
    """Make a `Rig`: scheduler, executor and argmax."""
    return lambda **options: Rig(scripted, **options)


class Inbox:
    """Collects one request's outputs."""

    def __init__(self) -> None:
        self.outputs = []
        self.request_id = None

    def __call__(self, output) -> None:
        self.outputs.append(output)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def reason(self) -> str | None:
        """The finish reason: at most one, in the last output."""
        reasons = [output.finish_reason for output in self.outputs if output.finish_reason is not None]
        assert len(reasons) <= 1
        assert not reasons or self.outputs[-1].finish_reason is not None
        return reasons[0] if reasons else None


class Drive:
    """What tests do with an engine that no thread runs."""

    Inbox = Inbox

    @staticmethod
    def greedy(max_tokens: int | None, **options) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, temperature=0, **options)

    @staticmethod
    def submit(engine, prompt, params, **options) -> Inbox:
        inbox = Inbox()
        inbox.request_id = engine.submit(prompt, params, on_output=inbox, **options)
        return inbox

    @classmethod
    def run(cls, engine, max_steps: int = 20_000) -> None:
        steps = 0
        while engine.step():
            steps += 1
            assert steps < max_steps
        cls.assert_idle(engine)

    @staticmethod
    def assert_idle(engine) -> None:
        """The invariant probe."""
        engine.scheduler.check_integrity()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, stats.pinned_blocks)
        assert stats.blocks_free + stats.blocks_cached + stats.pinned_blocks == stats.blocks_total
        assert not engine._worker._unfinished

    @staticmethod
    def alone(prompt, params, vocab_size: int = 64) -> list[int]:
        """What the request must get: the reference logits and the sampler, no engine."""
        state = SamplingState(params, prompt, frozenset(), vocab_size, params.seed or 0)
        tokens = list(prompt)
        for _ in range(params.max_tokens):
            tokens.append(sample(reference_logits(tokens, vocab_size)[-1:], [state])[0].token_id)
            state.accept(tokens[-1])
        return tokens[len(prompt) :]


@pytest.fixture
def drive() -> type[Drive]:
    return Drive


@pytest.fixture
def scripted():
    """Namespace of the scripted model: Executor, make_manifest, reference_logits."""

    class Scripted:
        Executor = ScriptedExecutor
        manifest = staticmethod(make_manifest)
        logits = staticmethod(reference_logits)

        @staticmethod
        def greedy(prompt, count: int, vocab_size: int = 64) -> list[int]:
            """The `count` tokens a request alone in the world would get."""
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(reference_logits(tokens, vocab_size)[-1].argmax()))
            return tokens[len(prompt) :]

        @staticmethod
        def poison_on_allocate(pool, executor) -> None:
            """Fresh and reused blocks hold garbage, so that reading one before writing it shows."""
            allocate = pool.allocate

            def poisoned(count):
                blocks = allocate(count)
                executor.poison(blocks or ())
                return blocks

            pool.allocate = poisoned

    return Scripted
