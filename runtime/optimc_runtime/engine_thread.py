"""The engine's own thread, and what callers on other threads leave for it.

A request, an abort or a call is only noted, and the thread woken; it takes the notes in before each step. It sleeps
while there is nothing to do, and leaves once the engine is closed and nothing is left.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum, auto

from optimc.errors import EngineError, OverloadedError, RequestError
from optimc_runtime.active_request import ActiveRequest
from optimc_runtime.config import EngineConfig
from optimc_runtime.executor.base import Executor
from optimc_runtime.queue_limits import QueueLimits
from optimc_runtime.request import RequestId
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.speculate.tree import Speculator
from optimc_runtime.stats import EngineStats
from optimc_runtime.step_loop import StepLoop
from optimc_runtime.wait_forecast import WaitForecast

_log = logging.getLogger(__name__)


class _State(Enum):
    NEW = auto()
    RUNNING = auto()
    DRAINING = auto()
    """Finishes what it has; accepts nothing."""
    STOPPING = auto()
    """Aborts what it has."""
    BROKEN = auto()
    """The loop itself failed; only `stop` is left."""


class EngineThread:
    """Runs a step loop, on a thread of its own after `start`, before on that of whoever calls `turn`. All other
    methods may be called from any thread."""

    def __init__(
        self, executor: Executor, scheduler: Scheduler, config: EngineConfig, speculator: Speculator | None
    ) -> None:
        self.loop = StepLoop(executor, scheduler, self._forget, speculator)
        """For the thread that runs it; `stats` apart."""
        self.thread: threading.Thread | None = None
        self._scheduler = scheduler
        self._last_progress_s = time.monotonic()

        self._wake = threading.Condition()  # guards what follows
        self._state = _State.NEW
        self._inbox: list[ActiveRequest] = []
        self._aborts: list[ActiveRequest] = []
        self._calls: list[tuple[Callable[[], None], Future[None]]] = []
        self._unfinished: dict[RequestId, ActiveRequest] = {}
        self._forecast = WaitForecast()
        self._queue_limits = QueueLimits(config, scheduler, self._forecast)
        self._refused = 0

    def start(self) -> None:
        """Start the thread; nothing happens if it runs. Raises EngineError after `stop`."""
        with self._wake:
            if self._state is _State.RUNNING:
                return
            self._check_open()
            self._state = _State.RUNNING
            self._last_progress_s = time.monotonic()
            self.thread = threading.Thread(target=self._run, name="optimc-engine", daemon=True)
            self.thread.start()

    def stop(self, *, drain: bool, timeout_s: float | None) -> None:
        """Accept nothing from now on, finish what was accepted (with `drain`, for at most `timeout_s`) or abort it, and
        return when no step runs any more."""
        self._leave(_State.DRAINING if drain else _State.STOPPING)
        if self.thread is None:
            while self.turn():
                pass
            return
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            self._leave(_State.STOPPING)
            self.thread.join()

    def enqueue(self, request: ActiveRequest) -> None:
        """Take in a request that was checked to fit. Raises RequestError if its id is in use, OverloadedError if the
        queue is full, EngineError if the engine is closed."""
        sequence = request.sequence
        with self._wake:
            self._check_open()
            if sequence.request_id in self._unfinished:
                raise RequestError(f"request id '{sequence.request_id}' is in use", param="request_id")
            try:
                self._queue_limits.check(sequence, [each.sequence for each in self._inbox])
            except OverloadedError:
                self._refused += 1
                raise
            if not self._unfinished:
                self._last_progress_s = time.monotonic()
            self._unfinished[sequence.request_id] = request
            self._inbox.append(request)
            self._wake.notify_all()

    def abort(self, request_id: RequestId) -> None:
        """End a request within one step. Nothing happens if it is unknown, finished or aborted already."""
        with self._wake:
            request = self._unfinished.get(request_id)
            if request is not None:
                self._aborts.append(request)
                self._wake.notify_all()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` between two steps, on the thread that runs them, and wait for it. Raises what it raises, and
        EngineError if the engine is closed."""
        done: Future[None] = Future()
        with self._wake:
            self._check_open()
            if self.thread is None:
                function()  # under the lock: whoever starts the thread meanwhile waits
                return
            self._calls.append((function, done))
            self._wake.notify_all()
        if self.thread is threading.current_thread():
            self._run_calls()
        done.result()

    def turn(self, *, wait: bool = False) -> bool:
        """Take in what arrived and run one step; return whether work is left. With `wait`, sleep until there is any."""
        with self._wake:
            while wait and self._state is _State.RUNNING and not self._has_news():
                self._wake.wait()
            for request in self._inbox:
                self.loop.add(request)
            self._inbox.clear()
            aborts, self._aborts = self._aborts, []
            stopping = self._state is _State.STOPPING
        for request in aborts:
            self.loop.abort(request)
        if self._calls:
            self._run_calls()
        if stopping:
            self.loop.abort_all()
        prefilled = self._scheduler.prefilled_tokens
        started_s = time.monotonic()
        self.loop.step()
        self._last_progress_s = time.monotonic()
        if (fresh := self._scheduler.prefilled_tokens - prefilled) > 0:
            with self._wake:
                self._forecast.prefilled(fresh, self._last_progress_s - started_s)
        return self._has_news()

    def stats(self) -> EngineStats:
        """Return a snapshot; requests the thread has not taken in yet count as waiting."""
        inbox = [each.sequence for each in tuple(self._inbox)]
        stats = self.loop.stats(len(inbox))
        waiting_tokens = stats.waiting_tokens + sum([sequence.num_tokens for sequence in inbox])
        return replace(stats, refused=self._refused, waiting_tokens=waiting_tokens)

    def stalled_s(self) -> float:
        """Return for how long no step has ended although there are requests; infinity once the loop is broken.

        Takes no lock: a stuck step must not be able to keep its own report waiting.
        """
        if self._state is _State.BROKEN:
            return math.inf
        if self._state is _State.NEW or not self._unfinished:
            return 0.0
        return time.monotonic() - self._last_progress_s  # of after the first request came, which sets it first

    def is_healthy(self, threshold_s: float) -> bool:
        """Return whether requests are accepted and, if there are any, a step ended in the last `threshold_s`."""
        return self._state in (_State.NEW, _State.RUNNING) and self.stalled_s() <= threshold_s

    def _run(self) -> None:
        try:
            while self._is_needed():
                self.turn(wait=True)
        except Exception as error:  # our own bug: nobody may wait for an answer that never comes
            self._break(error)

    def _is_needed(self) -> bool:
        """Whether the thread has to go on. If not, nothing more can arrive: both are decided under the lock."""
        with self._wake:
            return self._state is _State.RUNNING or self._has_news()

    def _has_news(self) -> bool:
        return bool(self._inbox or self._aborts or self._calls or self.loop.has_work)

    def _run_calls(self) -> None:
        with self._wake:
            calls, self._calls = self._calls, []
        for function, done in calls:
            try:
                function()
            except Exception as error:  # belongs to whoever waits for the call
                done.set_exception(error)
            else:
                done.set_result(None)

    def _check_open(self) -> None:
        if self._state is _State.BROKEN:
            raise EngineError("the engine is broken; see its log and restart it")
        if self._state not in (_State.NEW, _State.RUNNING):
            raise EngineError("the engine is closed")

    def _forget(self, request_id: RequestId) -> None:
        with self._wake:
            request = self._unfinished.pop(request_id, None)
            if request is not None and request.timings.scheduled_s is not None:
                self._forecast.ran(time.monotonic() - request.timings.scheduled_s)

    def _leave(self, state: _State) -> None:
        with self._wake:
            if self._state is not _State.BROKEN:
                self._state = state
            self._wake.notify_all()

    def _break(self, error: Exception) -> None:
        """Fail everything: the scheduler's own state cannot be trusted any more."""
        _log.critical("the engine's loop failed", exc_info=error)
        with self._wake:
            self._state = _State.BROKEN
            inbox, self._inbox = self._inbox, []
            calls, self._calls = self._calls, []
        failure = EngineError(f"the engine's loop failed: {type(error).__name__}: {error}")
        self.loop.fail_all(failure, inbox)
        for _, done in calls:
            done.set_exception(failure)
