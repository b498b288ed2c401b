"""Room for guesses: trees behind decoding sequences, cut to what is left of a step and of the pool.

They take free blocks only, none while anybody waits, and give them back after the step: a guess costs nobody a
preemption or a wait.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import StepLimits
from optimc_runtime.sequence import Sequence
from optimc_runtime.speculate.fit import fit
from optimc_runtime.speculate.tree import DraftTree

Drafter = Callable[[list[Sequence], int, int, bool], list[DraftTree | None] | None]
"""`Speculator.draft`."""


class Guesses:
    """Asks for trees and finds slots for them. `block_table`: [rows, W], row `sequence.row` holding that sequence's
    blocks."""

    def __init__(self, limits: StepLimits, pool: BlockPool, block_table: NDArray[np.int32]) -> None:
        self._limits = limits
        self._pool = pool
        self._table = block_table

    def ask(
        self, draft: Drafter, decoding: list[Sequence], chunk_tokens: int, *, chains_only: bool, may_take_blocks: bool
    ) -> list[DraftTree | None] | None:
        """Ask for trees behind the decoding sequences and make room for what fits, in their order; None if nothing
        comes of it. All decodes of the step have grown before, so nobody goes short."""
        budget = self._limits.max_step_tokens - len(decoding) - chunk_tokens
        # The root emits a token; a guess is worth something if another may follow.
        asked = [
            place
            for place, sequence in enumerate(decoding)
            if sequence.max_tokens - sequence.num_tokens > 1
            and sequence.num_output > 0
            and not sequence.all_logits
            and sequence.proposer != "off"
        ]
        if budget <= 0 or not asked:
            return None
        guesses = draft(
            [decoding[place] for place in asked], len(decoding) - len(asked) + chunk_tokens, budget, chains_only
        )
        if guesses is None:
            return None
        trees: list[DraftTree | None] = [None] * len(decoding)
        found = False
        for place, guess in zip(asked, guesses, strict=True):
            tree = (
                None
                if guess is None
                else self._fit(guess, decoding[place], budget, chain_only=chains_only, may_take_blocks=may_take_blocks)
            )
            if tree is not None:
                trees[place] = tree
                budget -= tree.shape.num_nodes
                found = True
        return trees if found else None

    def shrink(self, sequence: Sequence) -> None:
        """Give back blocks beyond the known tokens."""
        needed = -(-sequence.num_tokens // self._limits.block_size)
        if needed < len(sequence.blocks):
            self._table[sequence.row, needed : len(sequence.blocks)] = 0
            self._pool.free(sequence.blocks[needed:])
            del sequence.blocks[needed:]

    def _fit(
        self, guess: DraftTree, sequence: Sequence, budget: int, *, chain_only: bool, may_take_blocks: bool
    ) -> DraftTree | None:
        """Cut a guess to what fits the step, the sequence and free blocks, and take those. Nodes need slots each, so a
        tree may be wider than the sequence may be long."""
        most_nodes = min(budget, self._limits.max_request_tokens - sequence.num_tokens)
        tree = fit(guess, most_nodes, sequence.max_tokens - sequence.num_tokens - 1, chain_only=chain_only)
        if tree is None:
            return None
        size = self._limits.block_size
        held = len(sequence.blocks)
        missing = -(-(sequence.num_tokens + tree.shape.num_nodes) // size) - held
        if missing <= 0:
            return tree
        # Each block that is given back wakes whoever waits for blocks, for nothing.
        missing = min(missing, self._pool.num_free) if may_take_blocks else 0
        blocks = self._pool.allocate(missing)
        assert blocks is not None
        self._table[sequence.row, held : held + missing] = blocks
        sequence.blocks += blocks
        return fit(tree, (held + missing) * size - sequence.num_tokens, tree.shape.depth, chain_only=chain_only)
