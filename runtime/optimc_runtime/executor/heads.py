"""What a plan says about its Medusa heads, checked before an executor relies on it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optimc.errors import PlanCorruptError
from optimc.plan import HeadsInfo, Plan


def checked_heads(plan: Plan, *, has_program: bool) -> HeadsInfo | None:
    """Return the description of the plan's heads, None if it has none.

    Raises PlanCorruptError if the manifest describes heads and the program has none, or the other way round.
    """
    info = plan.manifest.medusa
    if (info is not None) != has_program:
        parts = ("the program", "the manifest") if info is None else ("the manifest", "the program")
        raise PlanCorruptError(f"{plan.path}: {parts[0]} has Medusa heads, {parts[1]} has none")
    return info


def draft_vocab(plan: Plan, info: HeadsInfo | None) -> NDArray[np.int32] | None:
    """Return the token ids of the draft vocabulary [V'], None if that is the whole vocabulary.

    Raises PlanCorruptError unless they are as many as the heads have logits, ascending, and tokens of the model.
    """
    if info is None:
        return None
    vocab_size = plan.manifest.model.vocab_size
    if info.draft_vocab is None:
        if info.draft_vocab_size != vocab_size:
            raise PlanCorruptError(
                f"{plan.path}: heads over {info.draft_vocab_size} tokens, the vocabulary has {vocab_size} and no part "
                "of it is named"
            )
        return None
    ids = plan.tensor(info.draft_vocab)
    if ids.dtype != np.int32 or ids.shape != (info.draft_vocab_size,):
        raise PlanCorruptError(
            f"{plan.path}: draft vocabulary is {ids.dtype}{list(ids.shape)}, want int32[{info.draft_vocab_size}]"
        )
    if ids[0] < 0 or ids[-1] >= vocab_size or not bool((np.diff(ids) > 0).all()):
        raise PlanCorruptError(f"{plan.path}: draft vocabulary is not ascending token ids below {vocab_size}")
    result: NDArray[np.int32] = ids
    return result
