"""Medusa heads: hidden states come up with the logits, and candidates are what NumPy says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optimc.errors import EngineError, PlanCorruptError
from optimc.plan import DraftTreeInfo, HeadInfo, HeadsInfo, Plan
from optimc_passes.heads.heads import Heads
from optimc_passes.heads.reference import head_logits
from optimc_passes.weights import Dense

HIDDEN, VOCAB, HEADS = 32, 50, 3
PART = np.arange(1, 50, 2)
HALF = 4e-3
"""Of the largest logit; see test_against_onnxruntime."""


def make_heads(*, conditioned: bool, part: np.ndarray | None, output_head: np.ndarray) -> Heads:
    rng = np.random.default_rng(3)
    weights = {}
    for k in range(HEADS):
        width = 2 * HIDDEN if conditioned else HIDDEN
        weights[f"{k}.blocks.0.weight"] = Dense.of(
            (rng.standard_normal((HIDDEN, width)) / np.sqrt(width)).astype(np.float32)
        )
        weights[f"{k}.blocks.0.bias"] = Dense.of(rng.standard_normal(HIDDEN).astype(np.float32))
    if part is not None:
        weights["draft_vocab"] = Dense.of(part.astype(np.int32))
        weights["projection.weight"] = Dense.of(output_head[part])
    info = HeadsInfo(
        num_heads=HEADS,
        hidden_size=HIDDEN,
        num_blocks=1,
        conditioned=conditioned,
        projection="shared",
        draft_vocab_size=VOCAB if part is None else len(part),
        draft_vocab=None if part is None else "draft_vocab",
        bits=None,
        base_hash="",
        heads=(HeadInfo(confidence=((-5.0, 0.1), (0.0, 0.9))),) * HEADS,
        tree=DraftTreeInfo(nodes=((0,),), source="chain", expected_tokens=None, costs=(), machine=""),
    )
    return Heads(info, weights)


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


@pytest.mark.parametrize(("conditioned", "part"), [(True, None), (True, PART), (False, PART)])
def test_candidates_are_what_the_heads_say_of_the_steps_hidden_states(
    decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any, cache_type: Any, conditioned: bool, part: Any
) -> None:
    table = decoder.weights["embed"]
    heads = make_heads(conditioned=conditioned, part=part, output_head=table)
    executor = machine.load(tensorrt_plan(decoder, heads=heads))
    assert executor.heads.num_heads == HEADS
    cache = cache_type(64, 4)
    step = cache.step([("a", np.arange(20)), ("b", np.arange(3)), ("c", np.arange(1))], rows=[19, 22, 23])
    result = executor.execute(step)
    np.testing.assert_allclose(result.hidden @ table.T, result.logits, atol=HALF * np.abs(result.logits).max())
    for rows in (1, 2, 3):
        hidden, tokens = result.hidden[:rows].copy(), np.array([7, 49, 0])[:rows]
        embedded = table[tokens] if conditioned else None
        logits = head_logits(heads, table, hidden, embedded)
        peak = np.abs(logits).max(axis=-1, keepdims=True)
        expected = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        for _ in range(3):  # by itself, then as a graph
            drafted = executor.draft(hidden, tokens, 4)
            assert drafted.ids.shape == drafted.logprobs.shape == (rows, HEADS, 4)
            places = drafted.ids if part is None else np.searchsorted(part, drafted.ids)
            if part is not None:
                np.testing.assert_array_equal(part[places], drafted.ids)
            found = np.take_along_axis(expected, places, axis=-1)
            tolerance = 2 * HALF * peak.max()
            np.testing.assert_allclose(drafted.logprobs, found, atol=tolerance)
            best = np.sort(expected, axis=-1)[..., ::-1][..., :4]
            np.testing.assert_allclose(found, best, atol=tolerance)


def test_more_rows_than_the_heads_were_built_for_are_drafted_in_parts(
    decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any
) -> None:
    heads = make_heads(conditioned=True, part=None, output_head=decoder.weights["embed"])
    executor = machine.load(tensorrt_plan(decoder, heads=heads))
    rng = np.random.default_rng(0)
    hidden, tokens = rng.standard_normal((21, HIDDEN)).astype(np.float32), rng.integers(0, VOCAB, 21)
    together = executor.draft(hidden, tokens, 3)
    assert [shapes["tokens"] for shapes in machine.trt.enqueued] == [(8,)], "two more parts as a graph"
    for row in range(21):
        alone = executor.draft(hidden[row : row + 1], tokens[row : row + 1], 3)
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=0.05)


def test_what_does_not_fit_the_heads_is_refused(decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any) -> None:
    heads = make_heads(conditioned=True, part=None, output_head=decoder.weights["embed"])
    executor = machine.load(tensorrt_plan(decoder, heads=heads))
    hidden, tokens = np.zeros((2, HIDDEN), np.float32), np.array([1, 2])
    with pytest.raises(
        EngineError, match=r"draft of 4 candidates for 2 rows: hidden states \[2, 31\], want a row of 32"
    ):
        executor.draft(hidden[:, :31], tokens, 4)
    with pytest.raises(EngineError, match="token 50 is not one of 50"):
        executor.draft(hidden, np.array([1, 50]), 4)
    with pytest.raises(EngineError, match="draft of 51 candidates for 2 rows: "):
        executor.draft(hidden, tokens, 51)
    with pytest.raises(EngineError, match="draft of 1 candidates for 0 rows: hidden"):
        executor.draft(hidden[:0], tokens[:0], 1)
    assert executor.draft(hidden, tokens, 50).ids.shape == (2, HEADS, 50)
    plain = machine.load(tensorrt_plan(decoder))
    with pytest.raises(EngineError, match="the program has no heads"):
        plain.draft(hidden, tokens, 4)


def test_heads_of_another_form_than_the_manifests_are_refused(
    decoder: Any, tensorrt_plan: Callable[..., Plan], machine: Any
) -> None:
    heads = make_heads(conditioned=True, part=None, output_head=decoder.weights["embed"])
    info = tensorrt_plan(decoder, heads=heads).manifest.medusa
    other = info.model_copy(update={"hidden_size": 16})
    with pytest.raises(PlanCorruptError, match=r"a row of port 'hidden' is \[32\], the manifest says \[16\]"):
        machine.load(tensorrt_plan(decoder, heads=heads, changes={"medusa": other}))
    other = info.model_copy(update={"conditioned": False})
    with pytest.raises(
        PlanCorruptError, match="port 'tokens' is an input of int64 in the engine, the program says absent"
    ):
        machine.load(tensorrt_plan(decoder, heads=heads, changes={"medusa": other}))
    with pytest.raises(PlanCorruptError, match="the program has Medusa heads, the manifest has none"):
        machine.load(tensorrt_plan(decoder, heads=heads, changes={"medusa": None}))
