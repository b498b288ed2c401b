"""Tenants take turns, by tokens."""

import pytest

from optimc.errors import OverloadedError
from optimc_runtime.config import EngineConfig
from optimc_runtime.request import Terms
from optimc_runtime.sequence import Status


def admitted(r, sequences):
    """The sequences that are not waiting, in the order in which `step` let them in."""
    order = []
    while any(sequence.status is Status.WAITING for sequence in sequences):
        r.step()
        order += [each for each in sequences if each.status is not Status.WAITING and each not in order]
    return order


def test_a_flood_of_one_tenant_hardly_delays_another(rig):
    r = rig(num_blocks=64, max_seqs=1, max_step_tokens=8)
    flood = [r.add([i % 64, 1, 2], 2, tenant="a") for i in range(100)]
    for _ in range(5):
        r.step()
    late = [r.add([5, i, 3], 2, tenant="b") for i in range(3)]
    order = admitted(r, flood + late)
    places = [order.index(each) for each in late]
    assert places[0] <= sum(each.status is not Status.WAITING for each in flood[:5]) + 1
    assert places[2] - places[0] <= 5  # every other one is the flood's
    assert not r.scheduler._fair_share.is_contended  # the flood is alone again
    r.run()


def test_turns_are_counted_in_tokens_of_prompt_and_output(rig):
    """A's requests cost three times B's: B gets three for each of A's."""
    r = rig(num_blocks=64, max_seqs=1, max_step_tokens=32, cache=False)
    large = [r.add([i] * 4, 16, tenant="a") for i in range(10)]  # 4 + 2 x 16 = 36
    small = [r.add([i] * 10, 1, tenant="b") for i in range(30)]  # 10 + 2 x 1 = 12
    order = admitted(r, large + small)[:20]
    assert 4 <= sum(each.tenant == "a" for each in order) <= 6


def test_those_admitted_in_one_step_are_of_both(rig):
    r = rig(num_blocks=64, max_seqs=4, max_step_tokens=32)
    for tenant in ("a", "b"):
        for i in range(6):
            r.add([i, 1], 2, tenant=tenant)
    r.step()
    assert [each.tenant for each in r.scheduler.running] == ["a", "a", "b", "b"]
    r.run()


def test_one_tenant_is_served_as_if_there_were_none(rig):
    orders = []
    for tenant in ("", "a"):
        r = rig(num_blocks=64, max_seqs=2, policy="shortest-prompt")
        sequences = [r.add([1] * (1 + 7 * i % 11), 2, tenant=tenant) for i in range(20)]
        orders.append([each.request_id for each in admitted(r, sequences)])
    assert orders[0] == orders[1]


def test_unused_time_is_not_saved_up(rig):
    """B was away while A had a hundred requests; now both have a queue, and they take turns from the first."""
    r = rig(num_blocks=64, max_seqs=1)
    r.add([9], 2, tenant="b")
    r.run()
    for i in range(100):
        r.add([i % 64, 2], 2, tenant="a")
    r.run()
    both = [r.add([i, 7], 2, tenant=tenant) for i in range(10) for tenant in ("a", "a", "b")]
    order = admitted(r, both)[:12]
    assert 5 <= sum(each.tenant == "b" for each in order) <= 7


def test_within_a_tenant_the_policy_decides(rig):
    r = rig(num_blocks=64, max_seqs=1, policy="priority")
    mine = [r.add([1, i], 1, tenant="a", priority=-i) for i in range(4)]
    others = [r.add([2, i], 1, tenant="b", priority=-100) for i in range(4)]
    order = admitted(r, mine + others)
    assert [each for each in order if each.tenant == "a"] == mine[::-1]
    assert {each.tenant for each in order[:2]} == {"a", "b"}  # no priority buys another's turn


def test_totals_and_load_by_tenant(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1))
    drive.submit(engine, [1, 2, 3], drive.greedy(4), terms=Terms("a"))
    drive.submit(engine, [1, 2], drive.greedy(4), terms=Terms("b"))
    drive.submit(engine, [1], drive.greedy(1))
    engine.step()
    engine.step()
    stats = engine.stats().tenants
    assert (stats["a"].running, stats["a"].waiting, stats["a"].prompt_tokens, stats["a"].output_tokens) == (1, 0, 3, 2)
    assert (stats["b"].running, stats["b"].waiting, stats["b"].prompt_tokens, stats["b"].output_tokens) == (0, 1, 0, 0)
    drive.run(engine)
    stats = engine.stats().tenants
    assert set(stats) == {"a", "b"}
    assert [(each.prompt_tokens, each.output_tokens) for each in stats.values()] == [(3, 4), (2, 4)]


def test_a_key_may_fill_half_of_the_queue_only(make_engine, drive):
    engine = make_engine(EngineConfig(max_seqs=1, max_queued_requests=8))
    drive.submit(engine, [1], drive.greedy(3), terms=Terms("a"))
    engine.step()
    for _ in range(4):
        drive.submit(engine, [1], drive.greedy(1), terms=Terms("a"))
    with pytest.raises(OverloadedError, match="4 requests of key 'a' are waiting, 4 may beyond"):
        drive.submit(engine, [1], drive.greedy(1), terms=Terms("a"))
    for _ in range(4):
        drive.submit(engine, [1], drive.greedy(1), terms=Terms("b"))
    with pytest.raises(OverloadedError, match="^8 requests are waiting, 8 may"):
        drive.submit(engine, [1], drive.greedy(1), terms=Terms("c"))
    assert engine.stats().refused == 2
    drive.run(engine)


def test_a_key_may_fill_half_of_the_queued_tokens_only(make_engine, drive):
    engine = make_engine(EngineConfig(max_queued_tokens=40))
    for _ in range(2):
        drive.submit(engine, [1] * 10, drive.greedy(1), terms=Terms("a"))
    with pytest.raises(OverloadedError, match="20 prompt tokens of key 'a' are waiting; 1 more would exceed 20"):
        drive.submit(engine, [1], drive.greedy(1), terms=Terms("a"))
    drive.submit(engine, [1] * 10, drive.greedy(1), terms=Terms("b"))
    assert engine.stats().waiting_tokens == 30
    drive.run(engine)
    assert engine.stats().waiting_tokens == 0
