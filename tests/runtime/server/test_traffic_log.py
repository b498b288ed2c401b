"""What `--log-traffic` writes: every accepted request with its text, for its owner alone; no word of it elsewhere."""

from __future__ import annotations

import json
import logging
import stat
import threading
import time

import pytest

from optimc.errors import ConfigError, OverloadedError
from optimc_runtime.request import RequestId, RequestOutput, Timings, Usage
from optimc_runtime.server import ServerOptions
from optimc_runtime.server import traffic_log as module
from optimc_runtime.server.request_record import RequestRecord
from optimc_runtime.server.traffic_log import Asked, TrafficLog

SECRET = "the whale swims at dawn"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "traffic.jsonl"


@pytest.fixture
def logged(path, start_server, engine, template):
    """Run requests against a server that logs, then return the lines once `count` of them were written."""

    def run(ask, count, **options):
        log = TrafficLog(path, **options)
        with start_server(engine, template, ServerOptions(traffic_log=log)) as served:
            ask(served)
            deadline = time.monotonic() + 5  # a line follows the last byte, which the client may have read already
            while log.num_written < count and time.monotonic() < deadline:
                time.sleep(0.01)
        log.close()
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    return run


def record_of(log, text="hi", *, ids=(1, 2, 3)):
    record = RequestRecord("r1", "POST", "/v1/completions", "", time.monotonic())
    record.asked = Asked("completions", [list(ids)], 4, prompts=[text])
    record.accepted("cmpl-1", prompts=1, choices=1, stream=False, prompt_tokens=len(ids))
    log.record(record)


def test_a_conversation_is_written_as_its_client_sent_it(logged):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "caf\u00e9\n?"}]

    def ask(served):
        reply = served.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 9})
        assert reply.status_code == 200

    [line] = logged(ask, 1)
    assert line["format"] == 1
    assert line["endpoint"] == "chat"
    assert line["messages"] == messages
    assert line["max_tokens"] == 9
    assert "prompt_ids" not in line
    # The template puts a mark and the role's letter before each message, a mark after it, and one at the end; a token
    # is a byte otherwise: (3 + 9) + (3 + 7) + 1.
    assert line["prompt_tokens"] == 23
    assert line["output_tokens"] > 0
    assert 0 <= line["ttft_s"] < 5
    assert line["at_s"] >= 0


def test_ids_are_written_where_they_are_asked_for(logged):
    lines = logged(lambda served: served.complete("hi"), 1, ids=True)
    assert lines[0]["prompt_ids"] == [16 + ord("h"), 16 + ord("i")]


def test_each_prompt_of_a_request_has_a_line_of_its_own(logged):
    # Two prompts, two choices each: the output tokens of both choices count, the first one's cached tokens do.
    lines = logged(lambda served: served.complete(["ab", "cdef"], n=2), 2)
    assert [line["prompt"] for line in lines] == ["ab", "cdef"]
    assert [line["prompt_tokens"] for line in lines] == [2, 4]
    assert lines[0]["request_id"] == lines[1]["request_id"]
    assert lines[0]["output_tokens"] == lines[1]["output_tokens"]


def test_a_stream_that_is_left_and_a_failure_are_lines_too(logged, engine, script):
    def ask(served):
        engine.script = script(pieces=["a"] * 1000, delay_s=0.01)
        with served.http.stream("POST", "/v1/completions", json={"prompt": "left", "stream": True}) as reply:
            next(reply.iter_raw())
        engine.script = script(fail_after=0)
        assert served.complete("failed").status_code == 500
        engine.refuse = OverloadedError("full", retry_after_s=1)
        assert served.complete("refused").status_code == 429

    by_prompt = {line["prompt"]: line for line in logged(ask, 3)}
    assert set(by_prompt) == {"left", "failed", "refused"}
    assert by_prompt["left"]["output_tokens"] >= 1
    assert by_prompt["refused"]["output_tokens"] == 0
    # What was never computed has no first token, and nobody knows what would have been cached.
    assert not {"ttft_s", "cached_tokens"} & set(by_prompt["refused"])


def test_what_is_no_request_for_work_leaves_no_line(logged):
    def ask(served):
        served.http.get("/health")
        assert served.complete("x", temperature=-1).status_code == 400
        assert served.complete("kept").status_code == 200

    assert [line["prompt"] for line in logged(ask, 1)] == ["kept"]


def test_the_file_is_its_owners_alone(path):
    TrafficLog(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_there_is_never_written_over(path):
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is there already"):
        TrafficLog(path)
    with pytest.raises(ConfigError, match="is there already"):
        module.check_new_file(path)
    assert path.read_text() == "precious"


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match="--log-traffic"):
        module.check_new_file(tmp_path / "nowhere" / "traffic.jsonl")


def test_without_the_option_nothing_is_kept(served):
    assert served.complete(SECRET).status_code == 200
    assert ServerOptions().traffic_log is None


def test_no_text_reaches_any_other_log(logged, caplog):
    caplog.set_level(logging.DEBUG)
    logged(lambda served: served.complete(SECRET), 1)
    assert not [record for record in caplog.records if "whale" in record.getMessage()]


def test_a_full_queue_drops_counts_and_never_waits(path, monkeypatch, caplog):
    gate = threading.Event()
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    written = TrafficLog._line
    monkeypatch.setattr(TrafficLog, "_line", lambda self, entry: (gate.wait(5), written(self, entry))[1])
    log = TrafficLog(path)
    for number in range(5):  # the disk stands still: two may wait (one of them is being written), three are dropped
        record_of(log, f"prompt {number}")
    assert log.num_dropped == 3
    gate.set()
    log.close()
    assert log.num_written == 2
    assert [json.loads(line)["prompt"] for line in path.read_text().splitlines()] == ["prompt 0", "prompt 1"]
    said = [record.getMessage() for record in caplog.records if "dropped so far" in record.getMessage()]
    assert len(said) == 2  # at 1 and 2; the next would be at 4


def test_long_prompts_fill_the_queue_by_their_tokens(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 5)
    gate = threading.Event()
    written = TrafficLog._line
    monkeypatch.setattr(TrafficLog, "_line", lambda self, entry: (gate.wait(5), written(self, entry))[1])
    log = TrafficLog(path)
    for _ in range(2):
        record_of(log, ids=(1, 2, 3))  # 3 tokens fit in 5, 6 do not
    assert log.num_dropped == 1
    gate.set()
    log.close()


def test_a_full_disk_ends_the_log_not_the_server(path, monkeypatch, caplog):
    log = TrafficLog(path)

    def fail(_text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._file, "write", fail, raising=False)
    record_of(log)
    record_of(log)
    log.close()
    assert (log.num_written, log.num_dropped) == (0, 2)
    assert "No space left on device" in caplog.text


def test_figures_of_a_prompt_are_those_of_its_own_choices():
    record = RequestRecord("r", "POST", "/", "", arrived_s=10.0)
    record.accepted("a", prompts=2, choices=2, stream=False, prompt_tokens=8)
    times = {"arrival_s": 10.1, "scheduled_s": 10.2, "finished_s": 12.0}
    for index, (first_s, output, cached) in enumerate([(10.5, 3, 0), (10.4, 4, 4), (11.0, 5, 2), (11.5, 6, 4)]):
        timings = Timings(**times, first_token_s=first_s)
        usage = Usage(prompt_tokens=4, output_tokens=output, cached_tokens=cached)
        record.add(index, RequestOutput(RequestId(f"r-{index}"), (1,), "", None, None, usage, timings))
    assert record.prompt_figures(0) == {"output_tokens": 7, "cached_tokens": 0, "ttft_s": 0.4}
    assert record.prompt_figures(1) == {"output_tokens": 11, "cached_tokens": 2, "ttft_s": 1.0}
