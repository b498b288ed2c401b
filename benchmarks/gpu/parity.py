"""A TensorRT plan beside a reference plan of the same weights on the CPU: logits, and what greedy decoding makes of
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu.check import Outcome, at_least, at_most
from gpu.sequences import Sequences, logits_by_chunks
from optimc.plan import Plan
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import Executor
from optimc_runtime.request import SamplingParams


@dataclass(frozen=True)
class Limits:
    """How far the GPU's logits may be from the reference's.

    The reference computes in float32. SmolLM2's graph with its half islands, run by ONNX Runtime, is 5e-6 nats and 0.2%
    of the peak away from it and agrees on every likeliest token; a GPU sums in another order, which these limits leave
    a hundred times the room for. Quantizing to 4 bits costs 1e-2 to 1e-1 nats on the same text.
    """

    kl: float = 5e-4
    """Nats, mean over positions."""
    top1: float = 0.98
    """Share of positions with the same likeliest token."""
    margin: float = 0.02
    """Of the largest logit: how far below the reference's best a greedily chosen token may be."""
    same: float = 0.01
    """Of the largest logit: how far logits may move with what must not matter; see `invariance`."""


def check_parity(
    executor: Executor,
    reference: Executor,
    prompts: Sequence[NDArray[np.int64]],
    limits: Limits,
    chunk: int,
) -> Iterator[Outcome]:
    """Compare logits at every position of the prompts, computed in chunks of the given size, the last by tokens."""
    divergences, agreements, errors = [], [], []
    for prompt in prompts:
        head = max(1, len(prompt) - 8)
        sizes = [chunk] * -(-head // chunk)
        sizes[-1] = head - chunk * (len(sizes) - 1)
        found = logits_by_chunks(executor, prompt, [*sizes, 1]).astype(np.float64)
        wanted = logits_by_chunks(reference, prompt, [*sizes, 1]).astype(np.float64)
        p, q = _log_softmax(wanted), _log_softmax(found)
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        agreements.append(wanted.argmax(axis=1) == found.argmax(axis=1))
        errors.append(np.abs(found - wanted).max() / np.abs(wanted).max())
    kl, top1 = np.concatenate(divergences), np.concatenate(agreements)
    yield at_most("KL to the reference", float(kl.mean()), limits.kl, " nats", largest=float(kl.max()))
    yield at_least("same likeliest token", float(top1.mean()), limits.top1, positions=len(top1))
    yield Outcome("largest logit error", None, f"{max(errors):.2g} of the peak", figures={"value": max(errors)})


def check_greedy(
    plan: Plan,
    executor: Executor,
    reference: Executor,
    prompts: Sequence[NDArray[np.int64]],
    limits: Limits,
    tokens: int,
) -> Iterator[Outcome]:
    """Answer the prompts together through the whole engine, then ask the reference what it thinks of each token.

    The engine closes the executor.
    """
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with Engine(executor, plan.manifest, None, EngineConfig()) as engine:
        answers = [list(each.token_ids) for each in engine.generate([prompt.tolist() for prompt in prompts], params)]
    behind, same = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = np.concatenate([prompt, np.array(answer, np.int64)])
        logits = logits_by_chunks(reference, text, [64])[len(prompt) - 1 : -1]
        chosen = np.take_along_axis(logits, np.array(answer)[:, None], axis=1)[:, 0]
        behind.append((logits.max(axis=1) - chosen) / np.abs(logits).max())
        same.append(logits.argmax(axis=1) == answer)
    share = float(np.concatenate(same).mean())
    yield at_most(
        "greedy tokens behind the reference's", float(np.concatenate(behind).max()), limits.margin, " of the peak",
        same_token=share, answers=answers,
    )  # fmt: skip
    yield Outcome("greedy tokens that are the reference's", None, f"{share:.1%}", figures={"value": share})


def check_drafts(
    executor: Executor, reference: Executor, prompts: Sequence[NDArray[np.int64]], tolerance: float
) -> Iterator[Outcome]:
    """Compare the Medusa heads' log-probabilities on the reference's hidden states."""
    info = executor.heads
    assert info is not None
    hidden, tokens = [], []
    for index, prompt in enumerate(prompts):
        step = Sequences(reference.pool, index).step([("a", prompt[:32])], rows=[len(prompt[:32]) - 1])
        result = reference.execute(step)
        assert result.hidden is not None
        hidden.append(result.hidden[0].copy())
        tokens.append(int(result.logits[0].argmax()))
    rows, roots = np.array(hidden, np.float32), np.array(tokens, np.int64)
    top = min(16, info.draft_vocab_size)
    found, wanted = executor.draft(rows, roots, top), reference.draft(rows, roots, top)
    errors = []
    for place in np.ndindex(*found.ids.shape[:2]):
        known = dict(zip(wanted.ids[place].tolist(), wanted.logprobs[place].tolist(), strict=True))
        pairs = zip(found.ids[place].tolist(), found.logprobs[place].tolist(), strict=True)
        errors += [abs(logprob - known[token]) for token, logprob in pairs if token in known]
    yield at_most("drafted log-probabilities", max(errors), tolerance, " nats", compared=len(errors))
    agree = float((found.ids[..., 0] == wanted.ids[..., 0]).mean())
    yield at_least("same first guess", agree, 0.9)


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
