"""Which tokens may follow each row of a step's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optimc.errors import OptimcError, RequestError
from optimc_runtime.sampler import NothingToChooseError, RowMasks
from optimc_runtime.speculate.tree import DraftTree
from optimc_runtime.structured.grammar import GrammarState, mask_words


class StepMasks(NamedTuple):
    """The masks, and whose grammar failed."""

    rows: RowMasks
    failures: dict[int, RequestError]
    """By index of a sequence; its rows have no mask, and what they give means nothing."""


def step_masks(
    grammars: Sequence[GrammarState | None],
    trees: Sequence[DraftTree | None],
    first_rows: Sequence[int],
    num_rows: int,
    vocab_size: int,
) -> StepMasks:
    """Return the masks of `num_rows` rows of logits.

    Sequence s follows `grammars[s]`, if any; its rows start at `first_rows[s]`: one, or one for the root and one for
    each node of `trees[s]`. Rows of nobody's are not looked at.
    """
    counts = [
        0 if grammar is None else 1 if tree is None else 1 + tree.shape.num_nodes
        for grammar, tree in zip(grammars, trees, strict=True)
    ]
    words = np.empty((sum(counts), mask_words(vocab_size)), np.uint32)
    of_row = np.full(num_rows, -1, np.int32)
    failures: dict[int, RequestError] = {}
    end = 0
    for index, (grammar, tree, first_row, count) in enumerate(zip(grammars, trees, first_rows, counts, strict=True)):
        if grammar is None:
            continue
        start, end = end, end + count
        try:
            if tree is None:
                grammar.mask(words[start])
            else:
                grammar.tree_masks(tree.shape, tree.tokens, words[start:end])
        except RequestError as error:
            failures[index] = error
        else:
            of_row[first_row : first_row + count] = np.arange(start, end, dtype=np.int32)
    return StepMasks(RowMasks(words, of_row), failures)


def blamed(error: OptimcError, grammar: GrammarState | None) -> OptimcError:
    """Return `error` of sampling as the client is to see it: where a grammar leaves no token, it is the grammar's."""
    if grammar is None or not isinstance(error, NothingToChooseError):
        return error
    return RequestError(
        f"{grammar.param}: no token of the vocabulary continues the grammar here",
        param=grammar.param,
        code="grammar_dead_end",
    )
