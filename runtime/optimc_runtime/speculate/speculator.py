"""Speculation as the step loop sees it: asks proposers, decides what is worth verifying, learns what came of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.config import SpeculationOptions
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculate.asked_proposer import SHALLOWEST, AskedProposer
from optimc_runtime.speculate.calibration import LEAST, SURE
from optimc_runtime.speculate.controller import PROBE_NODES, choose
from optimc_runtime.speculate.cost_model import CostModel
from optimc_runtime.speculate.medusa import MedusaProposer
from optimc_runtime.speculate.offer import COMPARED_NODES, Offer, as_chain, confidences_of
from optimc_runtime.speculate.proposal import Proposer
from optimc_runtime.speculate.tally import Tally
from optimc_runtime.speculate.tree import DraftTree, Verified, tree_shape
from optimc_runtime.stats import SpeculationStats

_log = logging.getLogger(__name__)

STEP_OVERHEAD_S = 60e-6
"""What a step with trees takes outside the executor beyond a plain one."""
TREE_OVERHEAD_S = 12e-6
"""The same for each further tree."""
LEAST_GAIN = 0.02
"""Expected gains below this share are taken for none."""
TIMED_STEPS = 16
"""Every so many steps the cost model learns."""
BATCH_NODES = 48
"""Tokens asked of a proposer in all, where many sequences would get more than SHALLOWEST."""
TRUSTED_STEPS = 8
"""For so many steps like it, one in which asking could pay is taken for an example: means do not move faster."""
HOPE = 1.25
"""How much better than lately a proposer may be expected to be."""


class ProposingSpeculator:
    """See `Speculator`. `proposers`: those the engine has, the cheap ones first."""

    def __init__(self, options: SpeculationOptions, proposers: Ordered[Proposer], cost: CostModel) -> None:
        self.cost = cost
        self.is_idle = not proposers
        self.typical = (options.epsilon, options.delta) if options.acceptance == "typical" else (0.0, 0.0)
        self._options = options
        self._asked = [AskedProposer(proposer, is_cheap=proposer.name == "ngram") for proposer in proposers]
        self._known = tuple(self._asked)
        """Those switched off included."""
        self._medusa = next((each for each in proposers if isinstance(each, MedusaProposer)), None)
        self.wants_hidden = self._medusa is not None
        self._step = 0
        self._wakes_at = 0
        """When the first proposer is asked again."""
        self._drafts: dict[int, Offer] = {}
        """By sequence order: what the step under way verifies."""
        self._draft_s = 0.0
        """Of the step under way."""
        self._tally = Tally()

    def draft(
        self, sequences: list[Sequence], other_rows: int, most_nodes: int, chains_only: bool
    ) -> list[DraftTree | None] | None:
        """Return trees for the sequences for which some are expected to pay."""
        started_s = perf_counter()
        self._drafts.clear()
        drafts: list[Offer | None] = [None] * len(sequences)
        for asked in self._asked:
            if asked.attention.wakes_at <= self._step:
                self._ask(asked, sequences, drafts, other_rows, chains_only)
        trees = self._choose(sequences, drafts, other_rows, most_nodes)
        self._rest()
        self._draft_s = perf_counter() - started_s
        self._tally.draft_s += self._draft_s
        return trees

    def keep(self, sequences: tuple[Sequence, ...], hidden: NDArray[np.float32]) -> None:
        """Keep what the heads multiply."""
        if self._medusa is not None:
            self._medusa.keep(sequences, hidden)

    def observe(self, verified: list[Verified], num_sequences: int, num_rows: int, execute_s: float) -> None:
        """Learn how much was accepted and what it took."""
        self._step += 1
        used: list[AskedProposer] = []
        bonus = nodes = 0
        for result in verified:
            sequence, tree, path, num_emitted = result.sequence, result.tree, result.path, result.num_emitted
            draft = self._drafts[sequence.order]
            asked, parents = draft.asked, tree.shape.parents
            emitted = min(len(path), num_emitted)
            nodes += len(parents)
            bonus += num_emitted - 1
            self._tally.add_path(parents, path[:emitted])
            asked.drafted += len(parents)
            asked.accepted += emitted
            asked.trees += 1
            asked.calibration.learn(sequence.order, parents, confidences_of(tree, draft), path)
            if sequence.status is Status.FINISHED:
                asked.calibration.forget(sequence.order)  # it was forgotten before this was known
            if asked not in used:
                used.append(asked)
        self._tally.add_step(num_sequences, num_sequences + bonus)
        plain_s = self.cost.seconds(num_sequences, num_rows - nodes)
        overhead_s = STEP_OVERHEAD_S + TREE_OVERHEAD_S * (len(verified) - 1) + self._draft_s
        gained_s = plain_s * bonus / num_sequences - (self.cost.seconds(num_sequences, num_rows) - plain_s + overhead_s)
        for asked in used:
            asked.attention.settle(gained_s)
        if self._step % (TIMED_STEPS // 4) == 0 and num_rows == num_sequences + nodes:
            self.cost.correct(num_sequences, num_rows, execute_s)

    def plain_step(self, num_sequences: int, num_rows: int, execute_s: float) -> None:
        """Count a step, and wake up if it is time."""
        self._step += 1
        self._tally.add_step(num_sequences, num_sequences)
        if self._step % TIMED_STEPS == 0 and num_rows == num_sequences:
            self.cost.correct(num_sequences, num_rows, execute_s)
        if self.is_idle and self._step >= self._wakes_at and self._asked:
            self._rest()

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that ended."""
        for asked in self._known:
            asked.proposer.forget(sequence)
            asked.calibration.forget(sequence.order)

    def stats(self) -> SpeculationStats:
        """Return a snapshot."""
        tally = self._tally
        # `add_path` may be at work: tried are counted before accepted, so accepted are read before tried.
        accepted = tuple(tally.position_accepted)
        return SpeculationStats(
            mode=self._options.mode,
            is_active=not self.is_idle,
            proposers={each.name: each.stats() for each in self._known},
            position_drafted=tuple(tally.position_drafted[: len(accepted)]),
            position_accepted=accepted,
            sequence_steps=tally.sequence_steps,
            emitted=tally.emitted,
            draft_s=tally.draft_s,
        )

    def close(self) -> None:
        """Release what proposers hold."""
        for asked in self._known:
            asked.proposer.close()

    def _ask(
        self,
        asked: AskedProposer,
        sequences: list[Sequence],
        drafts: list[Offer | None],
        other_rows: int,
        chains_only: bool,
    ) -> None:
        """Let a proposer propose for the sequences that want it and have nothing better yet."""
        hope = sum(asked.usual[:COMPARED_NODES])
        places = [
            place
            for place, sequence in enumerate(sequences)
            if (sequence.proposer is None or sequence.proposer == "auto" or sequence.proposer == asked.name)
            and ((draft := drafts[place]) is None or draft.promise <= hope or not asked.usual)
        ]
        if not places:
            return
        if not asked.is_cheap and not self._can_pay(asked, len(places), len(sequences), other_rows):
            self._strike(asked, len(sequences), other_rows)
            return
        depth = min(asked.depth, max(SHALLOWEST, BATCH_NODES // len(places)), self._options.max_nodes)
        if self._options.always:
            depth = self._options.max_nodes
        wanted = sequences if len(places) == len(sequences) else [sequences[place] for place in places]
        try:
            offers = self._offers(asked, wanted, depth, chains_only=chains_only)
        except Exception as error:  # guessing is never worth a request: go on without
            _log.error("the %s proposer failed and is switched off", asked.name, exc_info=error)
            self._asked = [each for each in self._asked if each is not asked]
            self.wants_hidden = self.wants_hidden and asked.proposer is not self._medusa
            return
        deepest, is_vain = -1.0, True
        for place, offer in zip(places, offers, strict=True):
            if offer is None:
                continue
            deepest = max(deepest, offer.deepest)
            if not offer.estimates:
                asked.calibration.fade(sequences[place].order)
                continue
            is_vain = False
            other = drafts[place]
            if other is None or offer.promise >= other.promise:
                drafts[place] = offer
            if not asked.is_cheap:
                asked.take_usual(offer.estimates)
        if deepest >= 0:
            asked.adapt_depth(deepest, self._options.max_nodes)
            if is_vain:
                self._strike(asked, len(sequences), other_rows)

    def _offers(
        self, asked: AskedProposer, sequences: list[Sequence], depth: int, *, chains_only: bool
    ) -> list[Offer | None]:
        """Return what a proposer offers each sequence. Raises what it raises, and if it says what cannot be, as that a
        guess is right with probability NaN."""
        started_s = perf_counter()
        proposals = asked.proposer.propose(sequences, depth)
        if asked.is_cheap or any(proposals):  # heads that know no hidden state yet have not been evaluated
            asked.take_time((perf_counter() - started_s) / len(sequences))
        least = 0.0 if asked.attention.is_probing or self._options.always else LEAST
        offers: list[Offer | None] = []
        for sequence, proposal in zip(sequences, proposals, strict=True):
            if proposal is None:
                offers.append(None)
                continue
            if chains_only:
                proposal = as_chain(proposal)
            offers.append(Offer(asked, proposal, asked.calibration.estimates(sequence.order, proposal, least=least)))
        return offers

    def _can_pay(self, asked: AskedProposer, num_asked: int, num_sequences: int, other_rows: int) -> bool:
        """Whether even good guesses could be worth what asking for them costs."""
        if not asked.usual or self._options.always:
            return True
        shape = (num_asked, num_sequences, other_rows)
        if self._step < asked.pays_until and shape == asked.paying_shape and not asked.attention.is_probing:
            return True
        hopes = [min(SURE, HOPE * estimate) for estimate in asked.usual]
        if asked.attention.is_probing:  # text may have changed: what if it guessed everything right?
            hopes = [SURE**rank for rank in range(1, len(hopes) + 1)]
        hoped = [hope for hope in hopes for _ in range(num_asked)]
        draft_s = asked.proposer.cost_s * num_asked
        n = choose(hoped, num_sequences, other_rows, self.cost, draft_s)
        pays = self._pays(hoped[:n], num_sequences, other_rows, draft_s)
        if pays:
            asked.pays_until, asked.paying_shape = self._step + TRUSTED_STEPS, shape
        return pays

    def _choose(
        self, sequences: list[Sequence], drafts: list[Offer | None], other_rows: int, most_nodes: int
    ) -> list[DraftTree | None] | None:
        proposed = [draft for draft in drafts if draft is not None]
        if not proposed or most_nodes <= 0:
            return None
        batch = len(sequences)
        if len(proposed) == 1:
            merged = proposed[0].estimates[:most_nodes]
        else:
            merged = sorted([each for draft in proposed for each in draft.estimates], reverse=True)[:most_nodes]
        draft_s = sum([draft.asked.proposer.cost_s for draft in proposed])
        plain_s = self.cost.seconds(batch, batch + other_rows)
        overhead_s = STEP_OVERHEAD_S + TREE_OVERHEAD_S * (len(proposed) - 1)
        if self._options.always:
            n = len(merged)
        else:
            n = choose(merged, batch, other_rows, self.cost, draft_s, LEAST_GAIN + overhead_s / plain_s)
        pays = self._pays(merged[:n], batch, other_rows, draft_s + overhead_s)
        for asked in self._asked:
            mine = [draft for draft in proposed if draft.asked is asked]
            if not mine:
                continue
            if pays or self._options.always:
                asked.attention.expect_gain()
                continue
            if asked.attention.is_probing:
                n = max(n, min(PROBE_NODES, len(merged)))
            self._strike(asked, batch, other_rows)
        trees = self._trees(sequences, drafts, merged, n)
        return trees if n else None

    def _trees(
        self, sequences: list[Sequence], drafts: list[Offer | None], merged: list[float], n: int
    ) -> list[DraftTree | None]:
        """Return of each draft those of its nodes that are among the best `n` of all, `merged`."""
        least = merged[n - 1] if n else 2.0
        left = n - sum([estimate > least for estimate in merged[:n]])  # of those that are equal to the last
        trees: list[DraftTree | None] = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            if draft is None:
                trees.append(None)
                continue
            count = 0
            for estimate in draft.estimates:
                if estimate <= least:
                    if estimate < least or not left:
                        break
                    left -= 1
                count += 1
            asked = draft.asked
            if count:
                self._drafts[sequence.order] = draft
                shape = tree_shape(draft.parents[:count])
                trees.append(DraftTree(shape, draft.tokens[:count], asked.name, draft.estimates[:count]))
            else:
                asked.calibration.fade(sequence.order)
                trees.append(None)
        return trees

    def _pays(self, estimates: list[float], num_sequences: int, other_rows: int, draft_s: float) -> bool:
        """Whether verifying these nodes brings more tokens per second than a plain step would have."""
        if not estimates:
            return False
        rows = num_sequences + other_rows
        plain = num_sequences / self.cost.seconds(num_sequences, rows)
        return (num_sequences + sum(estimates)) / (
            self.cost.seconds(num_sequences, rows + len(estimates)) + draft_s
        ) > plain

    def _strike(self, asked: AskedProposer, num_sequences: int, other_rows: int) -> None:
        step_s = self.cost.seconds(num_sequences, num_sequences + other_rows)
        asked.attention.strike(self._step, asked.proposer.cost_s * num_sequences, step_s)

    def _rest(self) -> None:
        """Be idle exactly while every proposer sleeps, and keep nothing for heads that do."""
        first: int | None = None
        wants_hidden = False
        for asked in self._asked:
            wakes_at = asked.attention.wakes_at
            if first is None or wakes_at < first:
                first = wakes_at
            if wakes_at <= self._step and asked.proposer is self._medusa:
                wants_hidden = True
        self._wakes_at = first or 0
        self.is_idle = first is None or first > self._step
        self.wants_hidden = wants_hidden
