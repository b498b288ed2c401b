"""Whatever comes, in whatever order, the scheduler's invariants hold: hypothesis looks for an order in which not.

Requests with equal prompts stand for forks: an answer in several choices is several such requests.
"""

from collections import Counter
from functools import cache, partial

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from optimc.errors import ConfigError, EngineError
from optimc_runtime.prefix_cache import chain_hash
from optimc_runtime.sequence import Status
from optimc_runtime.speculate.tree import DraftTree, chain, tree_shape


class CutByTurns:
    """A chunk budget that asks for a plain step now and then, and otherwise leaves little or much."""

    def __init__(self, answers):
        self.answers, self.asked, self.given, self.learned = answers, 0, None, []

    def tokens(self, num_decodes):
        assert num_decodes > 0
        self.asked += 1
        self.given = self.answers[self.asked % len(self.answers)]
        return self.given

    def learn(self, num_decodes, chunk_tokens, execute_s):
        self.learned.append((num_decodes, chunk_tokens))


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, make_rig, greedy):
        super().__init__()
        self.make_rig, self.greedy = make_rig, greedy
        self.now_s = 0.0

    @initialize(
        policy=st.sampled_from(["fcfs", "shortest-prompt", "priority"]),
        num_blocks=st.sampled_from([24, 16, 12, 8, 6]),
        max_seqs=st.sampled_from([4, 3, 2, 1]),
        max_step_tokens=st.sampled_from([12, 8, 5, 3, 2]),
        chunked=st.booleans(),
        inflight=st.sampled_from([True, True, True, False]),
        answers=st.none() | st.lists(st.sampled_from([0, 1, 3, 50]), min_size=2, max_size=4),
        is_collision=st.sampled_from([False, False, True]),
        max_overtakes=st.integers(0, 3),
    )
    def begin(
        self, policy, num_blocks, max_seqs, max_step_tokens, chunked, inflight, answers, is_collision, max_overtakes
    ):
        # Whoever always asked for plain steps would never let a prompt in.
        self.cut = None if answers is None else CutByTurns([*answers, 3])
        self.rig = self.make_rig(
            num_blocks=num_blocks,
            block_size=2,
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            policy=policy,
            ageing_s=2.0,
            chunked_prefill=chunked,
            inflight_batching=inflight,
            chunk_budget=self.cut,
            block_hash=(lambda *_: 7) if is_collision else chain_hash,
            max_overtakes=max_overtakes,
        )
        self.chunked = chunked
        self.waited = False
        self.is_collision = is_collision

    @property
    def live(self):
        return [sequence for sequence in self.rig.sequences if sequence.status is not Status.FINISHED]

    @rule(
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-2, 2),
        token=st.integers(0, 1),
        length=st.integers(1, 12),
        output=st.sampled_from([12, 8, 5, 2, 1]),
        copies=st.integers(1, 2),
        scored=st.sampled_from([False, False, False, True]),
    )
    def add(self, tenant, priority, token, length, output, copies, scored):
        limits = self.rig.scheduler.limits
        length = min(length, limits.max_request_tokens - 1, 12 if self.chunked else limits.max_step_tokens)
        output = min(output, limits.max_request_tokens - length)
        for _ in range(copies):
            self.now_s += 0.3
            self.rig.add(
                [token] * length,
                output,
                tenant=tenant,
                priority=priority,
                arrived_s=self.now_s,
                extras=None if scored else (),
                all_logits=scored,
            )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        self.rig.scheduler.release(data.draw(st.sampled_from(self.live)))

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self._watch(self.rig.step)
            self.holds_together()

    @rule(count=st.integers(1, 6), depth=st.integers(1, 6), is_right=st.booleans())
    def steps_with_trees(self, count, depth, is_right):
        for _ in range(count):
            self._watch(partial(self.rig.step, partial(self._draft, depth, is_right)))
            self.holds_together()

    @rule()
    def failed_step(self):
        self.waited = False
        step = self.rig.scheduler.schedule()
        for item in () if step is None else step.work:
            self.rig.scheduler.release(item.sequence)

    @rule()
    def reset(self):
        self.rig.scheduler.reset_prefix_cache()

    @rule(token=st.integers(0, 1), length=st.integers(2, 6))
    def pin(self, token, length):
        scheduler = self.rig.scheduler
        before = len(scheduler.pins)
        try:
            scheduler.pin(np.full(length, token, np.int64), ())
        except (ConfigError, EngineError):
            assert len(scheduler.pins) == before
        else:
            assert not self.live

    @invariant()
    def holds_together(self):
        if not hasattr(self, "rig"):
            return
        scheduler, pool = self.rig.scheduler, self.rig.pool
        scheduler.check_integrity()
        used = {block for sequence in scheduler.running for block in sequence.blocks}
        used |= {block for block in range(pool.num_blocks) if block in scheduler.pins}
        assert pool.num_free + pool.num_cached_idle + len(used) == pool.num_blocks
        assert [each.order for each in scheduler.running] == sorted(each.order for each in scheduler.running)
        assert len(scheduler.pins) <= pool.num_blocks // 2
        for sequence in scheduler.running:
            assert len(sequence.blocks) <= -(-sequence.num_tokens // 2), "blocks of guesses were not given back"
        unfinished = Counter(sequence.tenant for sequence in self.live)
        for name, stats in scheduler.figures()["tenants"].items():
            assert stats.running + stats.waiting == unfinished[name]

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        most = rig.steps + 3000
        while self.live:
            self.steps_with_trees(1, 4, is_right=rig.steps % 2 == 0)
            assert rig.steps < most, "no end in sight"
        rig.assert_idle()
        for sequence in rig.sequences:
            prompt = sequence.tokens[: sequence.num_prompt].tolist()
            assert list(sequence.output_ids()) == self.greedy(prompt, sequence.num_output)

    def _watch(self, take_step):
        """Take a step: what decodes before it gets a token, is preempted, or waits for prompts that must run whole; and
        chunks keep to what was left them."""
        scheduler = self.rig.scheduler
        decoding = {
            each: (each.num_output, each.num_preemptions)
            for each in scheduler.running
            if each.num_tokens - each.num_computed == 1
        }
        asked = 0 if self.cut is None else self.cut.asked
        contexts = {each: each.num_tokens - each.num_computed for each in self.live}
        step = take_step()
        if step is None:
            assert not self.live
            return
        assert len(step.plan.tokens) <= scheduler.limits.max_step_tokens
        decodes = [each for each, (_, preemptions) in decoding.items() if each.num_preemptions == preemptions]
        waits = bool(decodes) and not any(item.sequence in decodes for item in step.work)
        assert not (waits and (self.chunked or self.waited)), "what decodes waited twice in a row"
        self.waited = waits
        if not waits:
            assert all(each.num_output > decoding[each][0] for each in decodes)
        if self.cut is not None and self.cut.asked > asked:
            chunks = [item for item in step.work if item.sequence not in decoding or item.sequence.num_preemptions]
            fresh = sum(item.num_tokens for item in chunks if contexts[item.sequence] > 1 and item.tree is None)
            assert fresh <= self.cut.given or not self.chunked

    def _draft(self, depth, is_right, sequences, other_rows, most_nodes, chains_only):
        trees = []
        for sequence in sequences:
            tokens = self.greedy(sequence.tokens[: sequence.num_tokens].tolist(), depth)
            if not is_right:
                tokens[depth // 3] = (tokens[depth // 3] + 1) % 64
            trees.append(DraftTree(tree_shape(chain(depth)), tokens, "ngram", [0.5] * depth))
        return trees


def test_no_order_of_events_breaks_the_scheduler(rig, scripted):
    @cache
    def next_token(context):
        return scripted.greedy(context, 1)[0]

    def greedy(prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(tuple(tokens)))
        return tokens[len(prompt) :]

    run_state_machine_as_test(
        lambda: SchedulerMachine(rig, greedy),
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
