"""The whole way on real time: an engine that answers from its own thread, and a server that is not there."""

import queue
import threading

import pytest

from optimc.errors import MeasureError
from optimc.measure import Workload, run_bench
from optimc_runtime.request import RequestId, RequestOutput, Timings, Usage


class ThreadedEngine:
    """Gives every running request one token per turn, from a thread of its own."""

    def __init__(self, manifest):
        self.manifest = manifest
        self.max_seq_len = 2048
        self.max_seqs = 8
        self.vocab_size = 384
        self.ended = {"length": 0, "abort": 0}
        self._notes = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._numbers = iter(range(10**6))

    def submit(self, prompt_ids, params, *, on_output):
        request_id = RequestId(str(next(self._numbers)))
        self._notes.put(("submit", request_id, [len(prompt_ids), 0, params.max_tokens, on_output]))
        return request_id

    def abort(self, request_id):
        self._notes.put(("abort", request_id, None))

    def reset_prefix_cache(self):
        pass

    def close(self):
        self._notes.put(("close", None, None))
        self._thread.join()

    def _run(self):
        running = {}
        while True:
            while not running or not self._notes.empty():
                kind, request_id, state = self._notes.get()
                if kind == "close":
                    return
                if kind == "submit":
                    running[request_id] = state
                elif request_id in running:
                    self._emit(request_id, running.pop(request_id), "abort")
            for request_id, state in list(running.items()):
                state[1] += 1
                finish = "length" if state[1] == state[2] else None
                self._emit(request_id, state, finish)
                if finish:
                    del running[request_id]

    def _emit(self, request_id, state, finish):
        prompt, done, _, on_output = state
        ids = () if finish == "abort" else (5,)
        if finish:
            self.ended[finish] += 1
        on_output(RequestOutput(request_id, ids, "", None, finish, Usage(prompt, done, 0), Timings(0.0)))


def test_an_engine_in_another_thread_is_measured_and_left_idle(make_manifest):
    engine = ThreadedEngine(make_manifest())
    progress = []
    try:
        config = Workload(prompt_tokens=32, output_tokens=200, concurrency=4, requests=20)
        result = run_bench(engine, config, lambda *args: progress.append(args))
    finally:
        engine.close()
    assert result.failures == {}
    assert (result.ttft_ms.n, result.output_tokens.low, result.output_tokens.high) == (20, 200, 200)
    assert result.itl_ms.n == 20 * 199
    assert result.output_tokens_per_s > 0
    assert progress == [(done, 20, "bench, concurrency 4") for done in range(21)]
    assert engine.ended["length"] >= 25
    assert engine.ended["abort"] <= 3  # fillers; some may have ended by themselves


def test_no_server_is_one_clear_line():
    with pytest.raises(MeasureError, match=r"http://127\.0\.0\.1:1/v1/models gives no model name \(ConnectError"):
        run_bench("http://127.0.0.1:1", Workload())
