"""Starting, stopping, sleeping, and callers on other threads."""

import math
import random
import threading
import time

import pytest

from optimc.errors import EngineError
from optimc_runtime.config import EngineConfig


def test_close_with_drain_finishes_what_was_accepted(make_engine, drive):
    engine = make_engine()
    engine.start()
    inboxes = [drive.submit(engine, [i], drive.greedy(20)) for i in range(20)]
    engine.close(drain=True)
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert engine.executor.closed
    drive.assert_idle(engine)


def test_close_without_drain_aborts_and_nothing_is_accepted_afterwards(make_engine, drive):
    engine = make_engine()
    inboxes = [drive.submit(engine, [i], drive.greedy(20)) for i in range(20)]
    engine.close()
    engine.close()
    assert {inbox.reason for inbox in inboxes} == {"abort"}
    for refused in (lambda: drive.submit(engine, [1], drive.greedy(1)), engine.start, lambda: engine.score([1])):
        with pytest.raises(EngineError, match="closed"):
            refused()
    assert not engine.is_healthy(1000)


def test_a_drain_that_takes_too_long_aborts_the_rest(make_engine, drive):
    engine = make_engine()
    engine.executor.before_step = lambda plan: time.sleep(0.05)
    engine.start()
    inbox = drive.submit(engine, [1], drive.greedy(60))
    engine.close(drain=True, timeout_s=0.05)
    assert inbox.reason == "abort"
    drive.assert_idle(engine)


def test_what_arrives_while_the_thread_is_about_to_leave_is_answered(make_engine, drive):
    """A request that came after the thread's last look, and before `close`, is ended like any other."""
    engine = make_engine()
    turn, late = engine._worker.turn, []

    def turn_and_submit(**options):
        has_news = turn(**options)
        if not has_news and not late:
            late.append(drive.submit(engine, [2], drive.greedy(3)))
            engine._worker._leave(engine._worker._state.STOPPING)
        return has_news

    engine._worker.turn = turn_and_submit
    engine.start()
    first = drive.submit(engine, [1], drive.greedy(3))
    engine._worker.thread.join(10)
    assert first.reason == "length"
    assert [inbox.reason for inbox in late] == ["abort"]
    drive.assert_idle(engine)


def test_an_idle_engine_sleeps(make_engine, drive):
    engine = make_engine()
    turns = []
    step = engine._loop.step
    engine._loop.step = lambda: (turns.append(1), step())
    engine.generate([[1]], drive.greedy(3))
    for _ in range(50):  # the last answer is out before its step ends
        count = len(turns)
        time.sleep(0.1)
        if len(turns) == count:
            return
    pytest.fail(f"{len(turns)} turns, and still turning")


def test_health_is_forward_progress(make_engine, drive):
    engine = make_engine()
    blocked, release = threading.Event(), threading.Event()

    def block(plan):
        blocked.set()
        release.wait(10)

    with engine:
        time.sleep(0.06)
        assert engine.is_healthy(0.05)  # idle, however long
        assert engine.stalled_s() == 0
        engine.executor.before_step = block
        inbox = drive.submit(engine, [1], drive.greedy(2))
        assert engine.is_healthy(5)
        assert blocked.wait(5)
        time.sleep(0.06)
        assert not engine.is_healthy(0.05)
        assert engine.stalled_s() >= 0.06
        release.set()
        deadline = time.monotonic() + 5
        while inbox.reason is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert engine.is_healthy(0.05)


def test_a_stall_is_told_whatever_holds_the_lock_and_while_draining(make_engine, drive):
    engine = make_engine()
    blocked, release = threading.Event(), threading.Event()

    def block(plan):
        blocked.set()
        release.wait(10)

    engine.executor.before_step = block
    engine.start()
    inbox = drive.submit(engine, [1], drive.greedy(2))
    assert blocked.wait(5)
    closing = threading.Thread(target=engine.close, kwargs={"drain": True})
    closing.start()
    with engine._worker._wake:
        asked = []
        asking = threading.Thread(target=lambda: asked.append(engine.stalled_s()))
        asking.start()
        asking.join(5)
    assert asked
    assert asked[0] > 0
    release.set()
    closing.join(10)
    assert inbox.reason == "length"
    assert engine.stalled_s() == 0


def test_a_broken_loop_is_stalled_for_ever(make_engine, drive):
    engine = make_engine()
    engine._loop.step = None
    with engine:
        inbox = drive.submit(engine, [1], drive.greedy(2))
        engine._worker.thread.join(5)
        assert inbox.reason == "error"
        assert engine.stalled_s() == math.inf


def test_submissions_and_aborts_from_many_threads(make_engine, scripted, drive):
    engine = make_engine(EngineConfig(max_queued_requests=1000), num_blocks=16)
    inboxes, lock = [], threading.Lock()

    def client(seed):
        rng = random.Random(seed)
        for _ in range(30):
            inbox = drive.submit(engine, [rng.randrange(3)] * rng.randint(1, 12), drive.greedy(rng.randint(1, 6)))
            with lock:
                inboxes.append(inbox)
            if rng.random() < 0.3:
                engine.abort(inbox.request_id)

    with engine:
        threads = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.close(drain=True)
    assert len(inboxes) == 180
    for inbox in inboxes:
        assert inbox.reason in ("length", "abort")
        usage = inbox.outputs[-1].usage
        assert usage.output_tokens == len(inbox.token_ids)
    drive.assert_idle(engine)
