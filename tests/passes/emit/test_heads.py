"""Medusa heads in plans of both targets: executors compute what `heads/reference.py` says, and nothing else changes.

Letters: N rows to draft for, K heads, d hidden size, V vocabulary, V' draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.plan import (
    FORMAT_VERSION,
    DraftTreeInfo,
    HeadInfo,
    HeadsInfo,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    Source,
    TargetInfo,
    TokenIds,
    write_plan,
)
from optimc_passes.artifact import Artifact
from optimc_passes.emit import TARGETS, Lowered, LoweringOptions
from optimc_passes.emit.heads_tensors import described_heads
from optimc_passes.graph.attach import attach_weights
from optimc_passes.heads.heads import Heads
from optimc_passes.heads.reference import head_logits
from optimc_passes.heads.root_embedding import root_embedding
from optimc_passes.weights import Dense, Quantized
from optimc_runtime.executor.base import Executor, StepPlan
from optimc_runtime.executor.load import load_executor

VOCAB, HIDDEN, MAX_TOKENS = 72, 48, 24
OPTIONS = LoweringOptions(
    block_size=4,
    int8_activations=None,
    activation_scales="group",
    kv_dtype="float32",
    max_step_tokens=MAX_TOKENS,
    max_seqs=8,
)
TARGET_NAMES = ["cpu", "onnxruntime"]


def make_heads(
    rounded: Callable[..., Quantized] | None = None,
    *,
    hidden: int = HIDDEN,
    num_heads: int = 3,
    num_blocks: int = 1,
    conditioned: bool = True,
    projection: str = "shared",
    draft_vocab: np.ndarray | None = None,
    output_head: Dense | Quantized | None = None,
    seed: int = 1,
) -> Heads:
    """Random heads. `output_head` [V, d] is what a shared projection over a part of the vocabulary takes rows of."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Dense | Quantized:
        array = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        return rounded(array) if rounded is not None and len(shape) == 2 else Dense.of(array)

    weights: dict[str, Any] = {}
    for k in range(num_heads):
        for b in range(num_blocks):
            weights[f"{k}.blocks.{b}.weight"] = draw(hidden, 2 * hidden if conditioned and b == 0 else hidden)
            weights[f"{k}.blocks.{b}.bias"] = draw(hidden)
        if projection == "own":
            weights[f"{k}.projection.weight"] = draw(VOCAB if draft_vocab is None else len(draft_vocab), hidden)
    if draft_vocab is not None:
        weights["draft_vocab"] = Dense.of(draft_vocab.astype(np.int32))
        if projection == "shared" and isinstance(output_head, Quantized):
            weights["projection.weight"] = output_head.rows(draft_vocab)
        elif projection == "shared":
            assert output_head is not None
            weights["projection.weight"] = Dense.of(output_head.read()[draft_vocab])
    info = HeadsInfo(
        num_heads=num_heads,
        hidden_size=hidden,
        num_blocks=num_blocks,
        conditioned=conditioned,
        projection=projection,
        draft_vocab_size=VOCAB if draft_vocab is None else len(draft_vocab),
        draft_vocab=None if draft_vocab is None else "draft_vocab",
        bits=None,
        base_hash="",
        heads=(HeadInfo(confidence=((-5.0, 0.1), (0.0, 0.9))),) * num_heads,
        tree=DraftTreeInfo(nodes=((0,),), source="chain", expected_tokens=None, costs=(), machine=""),
    )
    return Heads(info, weights)


PART = np.sort(np.random.default_rng(8).permutation(VOCAB)[:41])


class Served:
    """A tiny decoder with heads on one target."""

    def __init__(self, make_decoder: Any, target: str, **options: Any) -> None:
        self.rounded = options.pop("rounded", None)
        decoder = make_decoder(vocab=VOCAB, hidden=HIDDEN, tied=options.pop("tied", True))
        names = options.pop("quantize", ())
        store = decoder.store.replace({name: self.rounded(decoder.arrays[name]) for name in names})
        self.model = attach_weights(decoder.model, store)
        head = store["model.embed_tokens.weight" if "lm_head.weight" not in store else "lm_head.weight"]
        self.output_head = head.dequantize() if isinstance(head, Quantized) else head.read()
        self.artifact = Artifact("key", decoder.checkpoint(), store, graph=self.model)
        self.lowering = replace(OPTIONS, **options.pop("lowering", {}))
        heads = options.pop("heads", None)
        self.heads = heads(head) if callable(heads) else heads
        self.target = target
        self.lowered: Lowered = TARGETS[target](self.artifact.evolve(heads=self.heads), self.lowering)

    def manifest(self) -> Manifest:
        return Manifest(
            format_version=FORMAT_VERSION,
            name="tiny",
            target=TargetInfo(backend=self.target, requirements=self.lowered.requirements),
            model=ModelInfo(architecture="Tiny", vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=2),
            limits=Limits(max_seq_len=64, max_step_tokens=MAX_TOKENS, max_seqs=8, kv_memory_bytes=1 << 20),
            kv=self.lowered.kv,
            tokens=TokenIds(bos=None, eos=(0,), pad=None),
            medusa=None if self.heads is None else described_heads(self.heads),
            program=self.lowered.program,
            source=Source(
                model="m", model_hash="0", recipe={}, recipe_hash="0", calibration_hash=None, build_key="0", tools={}
            ),
        )

    def write(self, path: Path, **changed: Any) -> Plan:
        write_plan(path, self.manifest().model_copy(update=changed), self.lowered.tensors)
        return Plan.open(path)

    def load(self, path: Path) -> Executor:
        return load_executor(self.write(path), threads=2)

    def expected(self, hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Logits [N, K, V'] in NumPy."""
        assert self.heads is not None
        embedded = root_embedding(self.model, tokens) if self.heads.info.conditioned else None
        return head_logits(self.heads, self.output_head, hidden, embedded)


def first_step(tokens: np.ndarray, rows: list[int]) -> StepPlan:
    count = len(tokens)
    return StepPlan(
        tokens=tokens.astype(np.int64),
        positions=np.arange(count),
        slots=np.arange(count),
        query_start=np.array([0, count], np.int32),
        context_len=np.zeros(1, np.int32),
        block_table=np.arange(-(-count // 4), dtype=np.int32)[None],
        logits_rows=np.array(rows, np.int64),
    )


TOKENS = np.array([7, 3, 3, 50, 21, 64, 0, 9])


def check_draft(served: Served, executor: Executor, rows: int, tolerance: float, top: int = 4) -> None:
    """Compare log-probabilities of what was drafted with NumPy's, and that nothing likelier was left out."""
    rng = np.random.default_rng(rows)
    hidden = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, rows)
    logits = served.expected(hidden, tokens).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids, found = executor.draft(hidden, tokens, top)
    assert (ids.dtype, found.dtype) == (np.int32, np.float32)
    assert ids.shape == found.shape == (rows, served.heads.info.num_heads, top)
    vocab = np.arange(VOCAB) if "draft_vocab" not in served.heads.weights else PART
    assert np.isin(ids, vocab).all(), "ids are tokens of the full vocabulary, of the draft vocabulary's"
    places = np.searchsorted(vocab, ids)
    assert np.abs(found - np.take_along_axis(logprobs, places, -1)).max() < tolerance
    assert (np.diff(found, axis=-1) <= 0).all()
    best = -np.sort(-logprobs, axis=-1)[..., :top]
    assert np.abs(found - best).max() < tolerance


VARIANTS = {
    "conditioned-shared-whole": {},
    "plain-shared-whole": {"conditioned": False},
    "conditioned-shared-part": {"draft_vocab": PART},
    "plain-own-part": {"conditioned": False, "projection": "own", "draft_vocab": PART},
    "conditioned-own-whole-deep": {"projection": "own", "num_blocks": 2},
    "plain-shared-part-deep": {"conditioned": False, "num_blocks": 3, "draft_vocab": PART},
    "one-head": {"num_heads": 1, "draft_vocab": PART},
}


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_draft_is_what_numpy_says(tiny_decoder: Any, tmp_path: Path, target: str, variant: str) -> None:
    heads = lambda head: make_heads(output_head=head, **VARIANTS[variant])  # noqa: E731
    served = Served(tiny_decoder, target, heads=heads)
    executor = served.load(tmp_path / "engine.plan")
    assert executor.heads == served.manifest().medusa
    for rows in (1, 5, 8, MAX_TOKENS + 3):  # more rows than fit at once are split
        check_draft(served, executor, rows, 1e-4)
    executor.close()


@pytest.mark.parametrize("variant", ["conditioned-shared-whole", "conditioned-shared-part", "plain-shared-part-deep"])
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (4, 24)])
def test_heads_in_codes_lose_what_rounding_activations_loses(
    tiny_decoder: Any, quantized: Any, tmp_path: Path, variant: str, bits: int, group: int
) -> None:
    """Exact where activations stay float32; with 8-bit activations a log-probability is off by a few hundredths."""
    rounded = lambda array: quantized(array, bits=bits, group=group, symmetric=True)  # noqa: E731
    heads = lambda head: make_heads(rounded, output_head=head, **VARIANTS[variant])  # noqa: E731
    for int8, tolerance in ((False, 1e-4), (None, 0.08)):
        served = Served(
            tiny_decoder,
            "cpu",
            heads=heads,
            rounded=rounded,
            quantize=["model.embed_tokens.weight"],
            lowering={"int8_activations": int8},
        )
        executor = served.load(tmp_path / "engine.plan")
        for rows in (1, 7):
            check_draft(served, executor, rows, tolerance, top=1 if int8 is None else 4)
        executor.close()
