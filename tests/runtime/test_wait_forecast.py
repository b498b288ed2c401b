"""How long the first token takes, and who is refused for it."""

import threading
import time

import pytest

from optimc.errors import OverloadedError
from optimc_runtime.block_pool import BlockPool
from optimc_runtime.config import EngineConfig, StepLimits
from optimc_runtime.queue_limits import QueueLimits
from optimc_runtime.request import Terms
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence
from optimc_runtime.wait_forecast import WaitForecast


def test_nothing_is_said_before_anything_is_known():
    forecast = WaitForecast()
    assert forecast.first_token_s(1000, 10, 10, could_run=0, max_running=4) is None
    assert forecast.turnover_s(10, 4) == 0


def test_prompts_ahead_are_computed_one_after_the_other():
    forecast = WaitForecast()
    forecast.prefilled(100, 0.1)
    forecast.prefilled(300, 0.3)
    assert forecast.first_token_s(500, 1, 200, could_run=4, max_running=4) == pytest.approx(0.7)


def test_with_all_places_taken_somebody_must_end_first():
    forecast = WaitForecast()
    forecast.prefilled(1000, 1.0)
    forecast.ran(8.0)
    assert forecast.first_token_s(100, 3, 100, could_run=0, max_running=4) == pytest.approx(4 * 8 / 4 + 0.1)
    assert forecast.first_token_s(100, 3, 100, could_run=3, max_running=4) == pytest.approx(1 * 8 / 4 + 0.1)
    assert forecast.first_token_s(100, 3, 100, could_run=4, max_running=4) == pytest.approx(0.2)


def test_recent_speed_counts():
    forecast = WaitForecast()
    forecast.prefilled(100, 0.1)
    for _ in range(200):
        forecast.prefilled(100, 1.0)
        forecast.ran(3.0)
    assert forecast.prefill_s(100) == pytest.approx(1.0, rel=0.01)
    assert forecast.turnover_s(1, 1) == pytest.approx(3.0, rel=0.01)


class Queue:
    """A scheduler that never steps; 1,000 prompt tokens a second, requests of 10 s, two at once."""

    def __init__(self, slo_s, **options):
        pool = BlockPool(100, 4)
        self.scheduler = Scheduler(StepLimits(400, 8, 2, 4, 100), pool, None)
        self.forecast = WaitForecast()
        self.forecast.prefilled(1000, 1.0)
        self.forecast.ran(10.0)
        self.limits = QueueLimits(EngineConfig(ttft_slo_s=slo_s, **options), self.scheduler, self.forecast)
        self.count = 0

    def sequence(self, length, tenant=""):
        sequence = Sequence(str(self.count), self.count, [1] * length, 4)
        sequence.tenant = tenant
        self.count += 1
        return sequence

    def wait(self, length, tenant=""):
        self.scheduler.add(self.sequence(length, tenant))

    def run(self, length, computed):
        self.wait(length)
        self.scheduler.schedule()
        self.scheduler.running[-1].num_computed = computed

    def check(self, length, tenant=""):
        self.limits.check(self.sequence(length, tenant), ())


def test_what_would_wait_too_long_is_refused_and_told_when_to_come_back():
    queue = Queue(0.5)
    queue.wait(300)
    queue.check(190)
    with pytest.raises(OverloadedError, match="would take about 0.6 s, the limit is 0.5 s") as refused:
        queue.check(300)
    assert refused.value.retry_after_s == 1  # the least
    queue = Queue(2.0)
    for _ in range(3):
        queue.wait(8)
    with pytest.raises(OverloadedError, match="about 10 s") as refused:  # two of the four run at once
        queue.check(8)
    assert refused.value.retry_after_s == pytest.approx(8.0, abs=0.1)


def test_prompts_under_way_count_too():
    queue = Queue(0.3)
    queue.run(380, 379)
    queue.check(200)
    queue = Queue(0.3)
    queue.run(380, 100)
    with pytest.raises(OverloadedError, match="about 0.48 s"):
        queue.check(200)


def test_what_can_start_at_once_is_never_refused():
    Queue(0.01).check(300)


def test_of_another_tenants_flood_only_the_share_that_comes_first_counts():
    queue = Queue(0.5)
    for _ in range(20):
        queue.wait(20, "flood")
    with pytest.raises(OverloadedError):
        queue.check(20, "flood")
    for sequence in tuple(queue.scheduler.waiting[1:]):
        queue.scheduler.release(sequence)
    queue.wait(390, "flood")
    queue.check(200, "quiet")  # 200 of its own, and no more of the others'
    with pytest.raises(OverloadedError, match="about 0.52 s"):
        queue.check(260, "quiet")


def test_a_full_queue_says_when_there_is_room():
    queue = Queue(None, max_queued_requests=1)
    for _ in range(3):
        queue.wait(8)
    with pytest.raises(OverloadedError, match="3 requests are waiting, 1 may") as refused:
        queue.check(8)
    assert refused.value.retry_after_s == 5  # one of two that run 10 s
    queue.wait(8)
    queue.forecast.ran(1e6)
    with pytest.raises(OverloadedError) as refused:
        queue.check(8)
    assert refused.value.retry_after_s == 60


def test_an_engine_learns_from_its_steps_and_refuses_by_it(make_engine, drive):
    engine = make_engine(EngineConfig(ttft_slo_s=0.05, max_seqs=2))
    blocked, release = threading.Event(), threading.Event()
    engine.executor.before_step = lambda plan: time.sleep(0.02)
    with engine:
        engine.generate([[1] * 30] * 2, drive.greedy(2))  # 8 tokens a step, 20 ms each

        def block(plan):
            blocked.set()
            release.wait(10)

        engine.executor.before_step = block
        first = drive.submit(engine, [1] * 8, drive.greedy(4))
        assert blocked.wait(10)
        second = drive.submit(engine, [1] * 8, drive.greedy(4))
        with pytest.raises(OverloadedError, match="first token would take about"):
            drive.submit(engine, [1] * 30, drive.greedy(1), terms=Terms("a"))
        assert engine.stats().refused == 1
        # The same as one of several that a question asks for at once: its first token is another's.
        third = drive.submit(engine, [1] * 30, drive.greedy(1), terms=Terms("a", is_follower=True))
        release.set()
        engine.close(drain=True)
    assert (first.reason, second.reason, third.reason) == ("length", "length", "length")
