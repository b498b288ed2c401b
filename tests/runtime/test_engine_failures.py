"""Failures stay where they arose."""

import threading
import time

import numpy as np
import pytest

from optimc.errors import EngineError


def test_a_failing_step_loses_its_requests_only_and_publishes_nothing(make_engine, scripted, drive):
    engine = make_engine(max_seqs=2)
    lost = [drive.submit(engine, [i] * 8, drive.greedy(4)) for i in range(2)]
    waiting = drive.submit(engine, [0] * 8, drive.greedy(4))
    engine.step()  # the first prompt's blocks are written and published here

    def fail(plan):
        raise RuntimeError("out of order")

    engine.executor.after_step = fail
    engine.step()
    engine.executor.after_step = None
    assert [inbox.reason for inbox in lost] == ["error", "error"]
    assert isinstance(lost[0].outputs[-1].error, EngineError)
    assert "RuntimeError: out of order" in str(lost[0].outputs[-1].error)
    engine.scheduler.check_integrity()
    again = drive.submit(engine, [1] * 8, drive.greedy(4))
    drive.run(engine)
    assert waiting.token_ids == scripted.greedy([0] * 8, 4)
    assert waiting.outputs[-1].usage.cached_tokens == 4  # from before the failure
    assert again.token_ids == scripted.greedy([1] * 8, 4)
    assert again.outputs[-1].usage.cached_tokens == 0
    assert (engine.stats().failed_steps, engine.stats().finished["error"]) == (1, 2)


def test_what_a_failing_executor_took_is_the_executors(make_engine, drive):
    engine = make_engine()

    def fail(plan):
        time.sleep(0.05)
        raise RuntimeError("out of order")

    engine.executor.before_step = fail
    drive.submit(engine, [1], drive.greedy(2))
    engine.step()
    engine.executor.before_step = None
    assert engine.stats().execute_s >= 0.05


def test_unusable_logits_fail_their_request_alone(make_engine, scripted, drive):
    engine = make_engine(max_step_tokens=32)
    execute = engine.executor.execute

    def with_nan(plan):
        result = execute(plan)
        result.logits[1, 3] = np.nan
        return result

    inboxes = [drive.submit(engine, [i], drive.greedy(3)) for i in range(3)]
    engine.executor.execute = with_nan
    engine.step()
    engine.executor.execute = execute
    drive.run(engine)
    assert [inbox.reason for inbox in inboxes] == ["length", "error", "length"]
    assert "NaN" in str(inboxes[1].outputs[-1].error)
    assert inboxes[2].token_ids == scripted.greedy([2], 3)


def test_a_failing_callback_ends_its_request_only(make_engine, scripted, drive):
    engine = make_engine()
    seen = []

    def failing(output):
        seen.append(output)
        raise ValueError("no")

    engine.submit([1], drive.greedy(5), on_output=failing)
    other = drive.submit(engine, [2], drive.greedy(5))
    drive.run(engine)
    assert [output.finish_reason for output in seen] == [None, "error"]
    assert other.token_ids == scripted.greedy([2], 5)


def test_a_broken_loop_fails_everything_and_says_so(make_engine, drive):
    engine = make_engine()
    engine.start()
    started = threading.Event()
    engine.scheduler.schedule = lambda: (started.wait(5), 1 / 0)
    arrived = [threading.Event() for _ in range(2)]
    outputs = []
    for event in arrived:
        engine.submit([1], drive.greedy(5), on_output=lambda output, event=event: (outputs.append(output), event.set()))
    started.set()
    assert all(event.wait(5) for event in arrived)
    engine._worker.thread.join(5)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert not engine.is_healthy(1000)
    with pytest.raises(EngineError, match="broken"):
        drive.submit(engine, [1], drive.greedy(5))
