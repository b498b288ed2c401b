"""What every target's plan holds of Medusa heads: the tokens they guess among."""

from __future__ import annotations

import numpy as np

from optimc.plan import HeadsInfo, PlanTensor
from optimc.plan.tensor_names import DRAFT_VOCAB
from optimc_passes.heads import heads as names
from optimc_passes.heads.heads import Heads
from optimc_passes.weights import Dense


def draft_vocab_tensors(heads: Heads) -> list[PlanTensor]:
    """Return the tensor with the ids of the draft vocabulary; none if that is the whole vocabulary."""
    ids = heads.weights.get(names.DRAFT_VOCAB)
    if ids is None:
        return []
    assert isinstance(ids, Dense), "token ids are numbers"
    return [PlanTensor(DRAFT_VOCAB, "I32", ids.shape, lambda: ids.read().astype(np.int32))]


def described_heads(heads: Heads) -> HeadsInfo:
    """Return the manifest's description of heads whose tensors the plan holds."""
    tensor = DRAFT_VOCAB if names.DRAFT_VOCAB in heads.weights else None
    return heads.info.model_copy(update={"draft_vocab": tensor})
