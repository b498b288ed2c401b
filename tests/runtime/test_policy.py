"""Who enters first, and that nobody starves."""

import pytest

from optimc_runtime.config import EngineConfig
from optimc_runtime.policy import rank
from optimc_runtime.request import Terms
from optimc_runtime.sequence import Sequence, Status
from optimc_runtime.speculate.tree import DraftTree, tree_shape


def a_sequence(order, *, length=1, priority=0, arrived_s=0.0):
    sequence = Sequence(str(order), order, [1] * length, 1)
    sequence.priority, sequence.arrived_s = priority, arrived_s
    return sequence


def names(sequences, policy, ageing_s=10.0):
    return [each.request_id for each in sorted(sequences, key=lambda each: rank(each, policy, ageing_s))]


def test_each_policy_has_its_order():
    waiting = [
        a_sequence(0, length=9, priority=1),
        a_sequence(1, length=5, priority=-1),
        a_sequence(2, length=5),
        a_sequence(3, length=7, priority=-1),
    ]
    assert names(waiting, "fcfs") == ["0", "1", "2", "3"]
    assert names(waiting, "shortest-prompt") == ["1", "2", "3", "0"]
    assert names(waiting, "priority") == ["1", "3", "2", "0"]


def test_waiting_counts_as_levels_of_priority_and_as_shorter_prompts():
    old, new = a_sequence(0, priority=2), a_sequence(1, arrived_s=19.0)
    assert names([old, new], "priority") == ["1", "0"]
    new.arrived_s = 21.0
    assert names([old, new], "priority") == ["0", "1"]
    assert names([old, new], "priority", ageing_s=100.0) == ["1", "0"]
    long, short = a_sequence(0, length=401), a_sequence(1, arrived_s=1.9)
    assert names([long, short], "shortest-prompt") == ["1", "0"]
    short.arrived_s = 2.1
    assert names([long, short], "shortest-prompt") == ["0", "1"]


@pytest.mark.parametrize("policy", ["fcfs", "shortest-prompt", "priority"])
def test_those_that_ran_before_come_first(policy):
    fresh, preempted = a_sequence(0, priority=-100), a_sequence(1, length=5000, priority=100)
    preempted.num_preemptions = 1
    assert names([fresh, preempted], policy) == ["1", "0"]


@pytest.mark.parametrize("policy", ["shortest-prompt", "priority"])
def test_the_least_of_all_runs_after_a_bounded_number_of_others(rig, policy):
    """Ten a second come that are better by 400 tokens, or two levels; after the time that is worth, none passes."""
    r = rig(num_blocks=600, max_seqs=1, max_seq_len=2000, max_step_tokens=64, policy=policy, ageing_s=1.0)
    r.add([0], 1)
    least = r.add([1] * 401, 1, priority=2, arrived_s=0.0)
    passed = 0
    for i in range(100):
        r.add([2], 1, arrived_s=0.1 * i)
        r.step()
        if least.status is not Status.WAITING:
            break
        passed += 1
    assert passed == 21
    r.run()


def test_a_preempted_request_comes_back_before_what_is_shorter(rig):
    r = rig(num_blocks=6, cache=False, policy="shortest-prompt", max_overtakes=0)
    for i in range(3):
        r.add([i, i + 1, i + 2], 20)
    while not r.scheduler.num_preemptions:
        r.step()
    [preempted] = r.scheduler.waiting
    short = r.add([5], 1)
    while short.status is Status.WAITING:
        r.step()
    assert preempted.status is not Status.WAITING
    r.run()


def test_a_step_whose_chunks_are_cut_has_no_guesses(rig):
    """Whoever waits for a slowed step is not made to wait for guesses too."""

    class Cut:
        asked, answer = 0, 3

        def tokens(self, num_decodes):
            self.asked += 1
            return self.answer

        def learn(self, num_decodes, chunk_tokens, execute_s):
            pass

    cut = Cut()
    r = rig(num_blocks=64, max_step_tokens=32, max_seq_len=100, chunk_budget=cut)
    guesses = []

    def draft(sequences, other_rows, most_nodes, chains_only):
        guesses.append(len(sequences))
        return [DraftTree(tree_shape((-1,)), [1], "ngram", [0.5]) for _ in sequences]

    r.add([1, 2], 20)
    r.step()
    r.step()
    assert cut.asked == 0  # nothing to cut
    long = r.add(list(range(30)), 1)
    for computed in (3, 6):
        assert not r.step(draft).has_trees
        assert long.num_computed == computed
    cut.answer = 0
    assert not r.step(draft).has_trees
    assert (long.num_computed, guesses) == (6, [])
    cut.answer = 100
    r.step(draft)
    assert guesses == [1]
    assert r.scheduler.chunk_budget_tokens == 31


def test_the_policy_looks_at_a_requests_priority(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1, policy="priority"))
    ended = []
    for name, priority in (("a", 3), ("b", 0), ("c", -3)):
        engine.submit(
            [1],
            drive.greedy(2),
            on_output=lambda output: ended.append(output.request_id) if output.finish_reason else None,
            request_id=name,
            terms=Terms(priority=priority),
        )
    drive.run(engine)
    assert ended == ["c", "b", "a"]


def test_the_policy_of_short_prompts_looks_at_prompts(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1, policy="shortest-prompt"))
    long = drive.submit(engine, [1] * 20, drive.greedy(1))
    short = drive.submit(engine, [2], drive.greedy(5))
    while short.reason is None:
        engine.step()
    assert long.reason is None
    drive.run(engine)
