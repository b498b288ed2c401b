"""Text to train and measure heads on, and what steps of the model cost: one visit to the running model, if it runs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optimc.errors import CalibrationError, MissingExtraError, PlanTargetError
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.heads.config import HeadsData
from optimc_passes.heads.sample_text import CHAT, PROSE, TextSampler, openings_of
from optimc_passes.heads.samples import Samples, SampleStore
from optimc_passes.heads.target_model import TargetModel
from optimc_passes.heads.tree import timed_rows


@dataclass(frozen=True)
class Gathered:
    """What the visit brought."""

    samples: Samples
    costs: dict[int, float]
    """Seconds of a step for one sequence by its rows; empty if the model cannot run here."""
    machine: str
    decisions: tuple[str, ...]
    seconds: float

    @classmethod
    def nothing(cls, width: int) -> Gathered:
        """Return what a visit that could not be made brings."""
        empty = Samples(np.zeros(0, np.int32), np.zeros((0, width), np.float16), np.zeros(1, np.int64), ())
        return cls(empty, {}, "", (), 0.0)


def gather(artifact: Artifact, context: PassContext, folder: Path, data: HeadsData, seed: int) -> Gathered:
    """Sample from the model as it will be served; where it cannot run, walk it over the calibration text.

    Raises CalibrationError if there is nothing to sample with.
    """
    start = time.perf_counter()
    width = artifact.checkpoint.config.get_text_config(decoder=True).hidden_size
    store = SampleStore(folder, width)
    with ExitStack() as stack:
        model, why_not = _opened(artifact, context, stack)
        if model is None:
            costs, machine, decisions = {}, "", _walk(artifact, context, store, why_not)
        else:
            decisions = _sample(artifact, context, store, model, data, seed)
            costs, machine = model.step_costs(timed_rows(model.max_seq_len // 2)), model.machine
    return Gathered(store.open(), costs, machine, decisions, time.perf_counter() - start)


def _opened(artifact: Artifact, context: PassContext, stack: ExitStack) -> tuple[TargetModel | None, str]:
    if context.open_model is None:
        return None, "this build does not run models"
    try:
        return stack.enter_context(context.open_model(artifact)), ""
    except (MissingExtraError, PlanTargetError) as error:
        return None, str(error)


def _walk(artifact: Artifact, context: PassContext, store: SampleStore, why_not: str) -> tuple[str, ...]:
    if artifact.calibration is None:
        raise CalibrationError(
            f"the model cannot be sampled from ({why_not}), and there is no calibration text; add a calibration section"
        )
    from optimc_passes.heads.walked_samples import walk_samples  # which loads torch

    walk_samples(
        artifact, store, max_host_bytes=context.max_host_bytes, scratch=context.scratch, progress=context.progress
    )
    return (
        f"hidden states are those of the calibration text, computed in float32: the model cannot be sampled from "
        f"({why_not})",
    )


def _sample(
    artifact: Artifact, context: PassContext, store: SampleStore, model: TargetModel, data: HeadsData, seed: int
) -> tuple[str, ...]:
    openings = openings_of(artifact.calibration.tokens) if artifact.calibration is not None else []
    chat, prose = data.chat_tokens, data.prose_tokens
    decisions = []
    if model.chat is None and chat > 0:
        if not openings:
            raise CalibrationError(
                f"no conversations can be sampled ({model.no_chat}), and there is no calibration text to continue; add "
                "a calibration section and set data.prose_tokens"
            )
        decisions.append(f"no conversations: {model.no_chat}; {chat + prose:,} tokens of continuations instead")
        chat, prose = 0, chat + prose
    TextSampler(model, store, data, seed, context.progress).run(chat, openings, prose)
    for kind, wanted in ((CHAT, chat), (PROSE, prose)):
        found = store.tokens_of(kind)
        if found < wanted:
            decisions.append(f"{found:,} tokens of {kind}, {wanted:,} were asked for: there was no more to be had")
    return tuple(decisions)
