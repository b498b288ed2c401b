"""Medusa heads in plans of both targets: executors compute what `heads/reference.py` says, and nothing else changes.

Letters: N rows to draft for, K heads, d hidden size, V vocabulary, V' draft vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.errors import EngineError, LoweringError, PlanCorruptError
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
from optimc.plan.plan_difference import plan_difference
from optimc_passes.artifact import Artifact
from optimc_passes.emit import TARGETS, Lowered, LoweringOptions
from optimc_passes.emit.heads_tensors import described_heads
from optimc_passes.graph.attach import attach_weights
from optimc_passes.heads.heads import Heads
from optimc_passes.heads.reference import head_logits
from optimc_passes.heads.root_embedding import root_embedding
from optimc_passes.weights import Dense, Quantized
from optimc_runtime import _native
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
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (4, 24), (6, 48)])
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


@pytest.mark.parametrize("bits", [4, 8])
def test_onnxruntime_multiplies_heads_in_codes_as_they_are(
    tiny_decoder: Any, quantized: Any, tmp_path: Path, bits: int
) -> None:
    rounded = lambda array: quantized(array, bits=bits, group=16)  # noqa: E731
    heads = lambda head: make_heads(rounded, output_head=head, draft_vocab=PART)  # noqa: E731
    table = "model.embed_tokens.weight"
    served = Served(tiny_decoder, "onnxruntime", heads=heads, rounded=rounded, quantize=[table])
    executor = served.load(tmp_path / "engine.plan")
    for rows in (1, 5):
        check_draft(served, executor, rows, 1e-4)
    executor.close()


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_head_in_an_order_of_its_own_is_shared(
    tiny_decoder: Any, quantized: Any, tmp_path: Path, target: str
) -> None:
    """Codes of the output head lie permuted: heads that share it, or rows of it, read features in that order."""
    order = np.random.default_rng(6).permutation(HIDDEN).astype(np.int32)
    rounded = lambda array: quantized(array, bits=8, group=16, permutation=order)  # noqa: E731
    for part in (None, PART):
        served = Served(
            tiny_decoder,
            target,
            tied=False,
            heads=lambda head, part=part: make_heads(conditioned=False, output_head=head, draft_vocab=part),
            rounded=rounded,
            quantize=["lm_head.weight"],
            lowering={"int8_activations": False},
        )
        executor = served.load(tmp_path / "engine.plan")
        check_draft(served, executor, 5, 1e-4)
        executor.close()


@pytest.fixture(scope="module", params=TARGET_NAMES)
def served(request: pytest.FixtureRequest, tiny_decoder: Any) -> Served:
    """Conditioned heads that share all they can."""
    return Served(tiny_decoder, request.param, heads=lambda _: make_heads())


@pytest.fixture
def executor(served: Served, tmp_path: Path) -> Any:
    loaded = served.load(tmp_path / "engine.plan")
    yield loaded
    loaded.close()


def test_steps_answer_hidden_states_and_the_same_logits(
    served: Served, executor: Executor, tiny_decoder: Any, tmp_path: Path
) -> None:
    plain = Served(tiny_decoder, served.target).load(tmp_path / "plain.plan")
    for rows in ([7], [1, 4, 7], list(range(8)), []):
        step = first_step(TOKENS, rows)
        result = executor.execute(step)
        without = plain.execute(step)
        assert without.hidden is None
        assert result.hidden is not None
        assert result.hidden.shape == (len(rows), HIDDEN)
        # onnxruntime may fuse what lies around an output in another way; the cpu target computes the same bits.
        tolerance = 0 if served.target == "cpu" else 1e-5
        np.testing.assert_allclose(result.logits, without.logits, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(result.hidden @ served.output_head.T, result.logits, rtol=1e-4, atol=1e-4)
    plain.close()


def test_a_draft_takes_hidden_states_as_they_lie_and_leaves_the_step(served: Served, executor: Executor) -> None:
    result = executor.execute(first_step(TOKENS, [1, 4, 7]))
    assert result.hidden is not None
    hidden, logits = result.hidden.copy(), result.logits.copy()
    tokens = result.logits.argmax(-1)
    expected = served.expected(hidden, tokens)
    ids, _ = executor.draft(result.hidden, tokens, 3)
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=-1, kind="stable")[..., :3])
    again = executor.execute(first_step(TOKENS, [1, 4, 7]))
    np.testing.assert_array_equal(again.logits, logits)
    ids_again, _ = executor.draft(hidden[::-1], np.ascontiguousarray(tokens[::-1]), 3)
    np.testing.assert_array_equal(ids_again, ids[::-1])


def test_candidates_are_the_callers(executor: Executor) -> None:
    hidden = np.random.default_rng(1).standard_normal((2, HIDDEN)).astype(np.float32)
    first = executor.draft(hidden, np.array([1, 2]), 4)
    ids, logprobs = first.ids.copy(), first.logprobs.copy()
    executor.draft(-hidden, np.array([3, 4]), 4)
    np.testing.assert_array_equal(first.ids, ids)
    np.testing.assert_array_equal(first.logprobs, logprobs)
    first.ids[:] = 0  # may be written to


def test_rows_with_nan_give_tokens_and_no_probability(executor: Executor) -> None:
    hidden = np.random.default_rng(1).standard_normal((3, HIDDEN)).astype(np.float32)
    clean = executor.draft(hidden, np.array([1, 2, 3]), 4)
    hidden[1, 5] = np.nan
    ids, logprobs = executor.draft(hidden, np.array([1, 2, 3]), 4)
    assert (logprobs[1] == -np.inf).all()
    assert ((ids >= 0) & (ids < VOCAB)).all()
    for row in (0, 2):
        np.testing.assert_array_equal(ids[row], clean.ids[row])


def test_drafts_that_do_not_fit_are_refused_in_words(executor: Executor) -> None:
    hidden = np.zeros((2, HIDDEN), np.float32)
    for arguments, reason in (
        ((hidden, np.array([1, VOCAB]), 3), "token id"),
        ((hidden, np.array([1, -1]), 3), "token id"),
        ((hidden, np.array([1]), 3), "rows"),
        ((hidden[:, 1:], np.array([1, 2]), 3), "hidden states"),
        ((hidden[:0], np.array([], np.int64), 3), "draft"),
        ((hidden, np.array([1, 2]), VOCAB + 1), f"{VOCAB + 1} candidates"),
        ((hidden, np.array([1, 2]), 0), "0 candidates"),
    ):
        with pytest.raises(EngineError, match=reason):
            executor.draft(*arguments)
    assert executor.draft(hidden, np.array([1, 2]), VOCAB).ids.shape == (2, 3, VOCAB)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_plan_without_heads_has_none(tiny_decoder: Any, tmp_path: Path, target: str) -> None:
    served = Served(tiny_decoder, target)
    assert not {"hidden", "heads"} & set(served.lowered.program)
    assert not [tensor.name for tensor in served.lowered.tensors if "heads" in tensor.name]
    executor = served.load(tmp_path / "engine.plan")
    assert executor.heads is None
    with pytest.raises(EngineError, match="no heads"):
        executor.draft(np.zeros((1, HIDDEN), np.float32), np.array([1]), 1)
    executor.close()


def test_what_heads_share_lies_in_the_plan_once(served: Served, tiny_decoder: Any) -> None:
    plain = {tensor.name: tensor.nbytes for tensor in Served(tiny_decoder, served.target).lowered.tensors}
    added = [tensor for tensor in served.lowered.tensors if tensor.name not in plain]
    assert all(tensor.name.startswith("heads/") or tensor.name == "program/heads.onnx" for tensor in added)
    own = sum(tensor.nbytes for tensor in added if tensor.name.startswith("heads/"))
    blocks = 3 * (2 * HIDDEN * HIDDEN + HIDDEN) * 4
    # Panels are padded, and small vectors stay in the graph: nothing beside half the size of a table.
    assert abs(own - blocks) < VOCAB * HIDDEN * 4 / 2


def test_plans_with_and_without_heads_differ_by_their_description(
    served: Served, tiny_decoder: Any, tmp_path: Path
) -> None:
    plan = served.write(tmp_path / "engine.plan")
    plain = Served(tiny_decoder, served.target).write(tmp_path / "plain.plan")
    changes = plan_difference(plain, plan).settings
    assert {name: change.right for name, change in changes.items()} == {
        "heads.num_heads": 3,
        "heads.num_blocks": 1,
        "heads.conditioned": True,
        "heads.projection": "shared",
        "heads.draft_vocab_size": VOCAB,
        "heads.base_hash": "",
    }
    assert plan_difference(plan, plan).is_empty


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_heads_for_another_model_are_refused(tiny_decoder: Any, target: str) -> None:
    with pytest.raises(LoweringError, match="heads read hidden states of 40, the model's output head reads 48"):
        Served(tiny_decoder, target, heads=lambda _: make_heads(hidden=40))


def test_more_heads_than_a_step_has_rows_are_refused(tiny_decoder: Any, tmp_path: Path) -> None:
    lowering = {"max_step_tokens": 3}
    with pytest.raises(LoweringError, match="4 heads are evaluated in one step, and max_step_tokens is 3; raise it"):
        Served(tiny_decoder, "cpu", heads=lambda _: make_heads(num_heads=4), lowering=lowering)
    served = Served(tiny_decoder, "cpu", heads=lambda _: make_heads(num_heads=3), lowering=lowering)
    executor = served.load(tmp_path / "engine.plan")
    check_draft(served, executor, rows=2, tolerance=1e-4)
    executor.close()


def test_heads_rounded_in_different_ways_are_refused(tiny_decoder: Any, quantized: Any) -> None:
    heads = make_heads()
    name = "1.blocks.0.weight"
    mixed = replace(heads, weights={**heads.weights, name: quantized(heads.weights[name].read())})
    with pytest.raises(LoweringError, match="its heads are rounded in different ways"):
        Served(tiny_decoder, "cpu", heads=lambda _: mixed)


def test_a_manifest_and_a_program_that_disagree_are_refused(served: Served, tmp_path: Path) -> None:
    info = served.manifest().medusa
    assert info is not None
    path = tmp_path / "engine.plan"
    program = {key: value for key, value in served.lowered.program.items() if key != "heads"}
    for changed, reason in (
        ({"medusa": None}, "Medusa heads|heads: the manifest does not describe them"),
        ({"program": program}, "the manifest has Medusa heads, the program has none"),
        ({"medusa": info.model_copy(update={"draft_vocab_size": 30})}, "30"),
        ({"medusa": info.model_copy(update={"draft_vocab": "heads/absent"})}, "tensor 'heads/absent' is missing"),
    ):
        with pytest.raises(PlanCorruptError, match=reason):
            load_executor(served.write(path, **changed), threads=1)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_heads_of_another_form_than_described_are_refused(tiny_decoder: Any, tmp_path: Path, target: str) -> None:
    served = Served(tiny_decoder, target, heads=lambda _: make_heads())
    info = served.manifest().medusa
    assert info is not None
    changes: list[dict[str, Any]] = [{"hidden_size": HIDDEN - 1}]
    if target == "onnxruntime":  # the cpu target's program says itself what it reads and computes
        changes += [{"conditioned": False}, {"num_heads": 4, "heads": (*info.heads, *info.heads[:1])}]
    for changed in changes:
        plan = served.write(tmp_path / "engine.plan", medusa=info.model_copy(update=changed))
        with pytest.raises(PlanCorruptError, match="heads"):
            load_executor(plan, threads=1)


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("damage", ["descending", "beyond"])
def test_a_damaged_draft_vocabulary_is_refused(tiny_decoder: Any, tmp_path: Path, target: str, damage: str) -> None:
    wrong = PART[::-1].copy() if damage == "descending" else np.append(PART[:-1], VOCAB)
    served = Served(tiny_decoder, target, heads=lambda head: make_heads(output_head=head, draft_vocab=PART))
    heads = served.heads
    assert heads is not None
    broken = replace(heads, weights={**heads.weights, "draft_vocab": Dense.of(wrong.astype(np.int32))})
    served.lowered = TARGETS[target](served.artifact.evolve(heads=broken), OPTIONS)
    with pytest.raises(PlanCorruptError, match="not ascending token ids below 72"):
        load_executor(served.write(tmp_path / "engine.plan"), threads=1)


def damages(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield paths of all numbers and names in a JSON value."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from damages(each, (*path, key))
    else:
        yield path


def test_damaged_heads_are_refused_or_run_but_never_reach_outside(tiny_decoder: Any, tmp_path: Path) -> None:
    """Every number of the heads' section, and of their buffers, changed: an error in words, or a draft of tokens."""
    served = Served(tiny_decoder, "cpu", heads=lambda head: make_heads(output_head=head, draft_vocab=PART))
    rng = np.random.default_rng(4)
    program = served.lowered.program
    first = min(view["buffer"] for view in program["heads"]["inputs"])
    paths = [("heads", *path) for path in damages(program["heads"])]
    paths += [path for path in damages(program) if path[0] == "buffers" and path[1] >= first]
    hidden, tokens = np.ones((3, HIDDEN), np.float32), np.array([1, 2, 3])
    refused = 0
    for count, path in enumerate(paths):
        changed = copy.deepcopy(program)
        *way, last = path
        place = changed
        for key in way:
            place = place[key]
        wrong = [-1, 0, 1, place[last] + 1, 1 << 20] if isinstance(place[last], int) else ["absent", "tokens", "logits"]
        place[last] = wrong[rng.integers(len(wrong))]
        served.lowered = replace(served.lowered, program=changed)
        plan = served.write(tmp_path / f"{count % 2}.plan")
        try:
            executor = load_executor(plan, kv_memory_bytes=1 << 14, threads=1)
        except PlanCorruptError:
            refused += 1
            continue
        ids, _ = executor.draft(hidden, tokens, 3)
        assert np.isin(ids, PART).all()
        executor.close()
    assert refused > len(paths) / 3


def test_bytes_of_a_slot_follow_moves(tiny_decoder: Any, tmp_path: Path) -> None:
    for kv_dtype in ("float32", "int8", "int4"):
        served = Served(tiny_decoder, "cpu", lowering={"kv_dtype": kv_dtype})
        executor = served.load(tmp_path / f"{kv_dtype}.plan")
        executor.execute(first_step(TOKENS, [7]))
        program = executor._program
        held = [program.slot_bytes(slot) for slot in range(9)]
        assert len(set(held[:8])) == 8, "every token left something of its own"
        assert not any(held[8]), "nothing was written there"
        executor.move(np.array([5, 6]), np.array([6, 2]))
        assert program.slot_bytes(6) == held[5]
        assert program.slot_bytes(2) == held[6]
        assert program.slot_bytes(5) == held[5]
        with pytest.raises(ValueError, match="a slot is not in the pool"):
            program.slot_bytes(1 << 40)
        executor.close()


def test_top_rows_orders_equal_logits_by_id_and_matches_a_sort() -> None:
    rng = np.random.default_rng(9)
    for vocab in (1, 7, 128, 300, 1000):
        logits = rng.integers(-3, 4, (5, vocab)).astype(np.float32)
        count = min(vocab, 11)
        ids, logprobs = _native.top_rows(logits, count)
        np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :count])
        softmax = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        np.testing.assert_allclose(logprobs, np.take_along_axis(softmax, ids, -1), atol=1e-5)
    with pytest.raises(ValueError, match="4 candidates of 3"):
        _native.top_rows(np.zeros((1, 3), np.float32), 4)
    infinite = np.array([[0, np.inf, 1], [-np.inf, -np.inf, -np.inf]], np.float32)
    assert (_native.top_rows(infinite, 2)[1] == -np.inf).all()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_heads": 4}, "3 heads described, 4 declared"),
        ({"tree": {"nodes": ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))}}, "a tree of depth 4 over 3 heads"),
        ({"tree": {"nodes": ((0, 0), (0,))}}, r"node \[0, 0\] stands before its parent"),
        ({"tree": {"nodes": ((0,), (0,))}}, r"node \[0\] stands before its parent, twice"),
        ({"tree": {"nodes": ((-1,),)}}, "rank below 0"),
        ({"tree": {"nodes": ((VOCAB,),)}}, "more siblings than the 72 tokens"),
        ({"tree": {"costs": ((0, 1e-3),)}}, "rising numbers of rows"),
        ({"tree": {"costs": ((2, 1e-3), (1, 1e-3))}}, "rising numbers of rows"),
        ({"tree": {"costs": ((1, 1e-3), (1, 2e-3))}}, "rising numbers of rows"),
        ({"tree": {"costs": ((10**400, 1e-3),)}}, "rising numbers of rows"),
        ({"tree": {"costs": ((1, 0.0),)}}, "finite numbers above 0"),
        ({"tree": {"costs": ((1, float("nan")),)}}, "finite numbers above 0"),
        ({"tree": {"costs": ((1, float("inf")),)}}, "finite numbers above 0"),
        ({"confidence": ((-1.0, 0.5), (-2.0, 0.9))}, "confidence falls"),
        ({"confidence": ((-1.0, 0.5), (0.0, 1.9))}, "probabilities"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(changed: dict[str, Any], reason: str) -> None:
    info = make_heads().info
    assert HeadsInfo.model_validate_json(info.model_dump_json()) == info
    changed, described = dict(changed), info.model_dump()
    described["tree"] |= changed.pop("tree", {})
    if "confidence" in changed:
        described["heads"] = [{"confidence": changed.pop("confidence")}] * 3
    with pytest.raises(ValueError, match=reason):
        HeadsInfo.model_validate({**described, **changed})
