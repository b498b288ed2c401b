"""One line per request: complete, true, on one line, and without a word of anybody's text."""

from __future__ import annotations

import json
import logging
import re
import time

import pytest

from optimc.cli.log_format import JsonFormatter
from optimc_runtime.request import RequestId, RequestOutput, Timings, Usage
from optimc_runtime.server import ServerOptions
from optimc_runtime.server.keys import KeyRing
from optimc_runtime.server.log_event import LogEvent
from optimc_runtime.server.request_record import RequestRecord

KEY = "0123456789abcdef"


@pytest.fixture
def lines(caplog):
    """Return the request lines so far, as the JSON that goes to the log."""
    caplog.set_level(logging.INFO, logger="optimc.requests")
    started_s = time.time()

    def is_ours(record):
        """The server is the module's: the last line of the test before may come when it has ended."""
        return record.created - json.loads(JsonFormatter().format(record))["total_s"] >= started_s

    def read(count):
        deadline = time.monotonic() + 5  # a line follows the last byte, which the client may have read already
        records = []
        while len(records) < count and time.monotonic() < deadline:
            time.sleep(0.01)
            records = [record for record in caplog.records if record.name == "optimc.requests" and is_ours(record)]
        texts = [JsonFormatter().format(record) for record in records]
        assert len(texts) == count, texts
        assert all("\n" not in text for text in texts)
        return [json.loads(text) for text in texts]

    return read


def check_times(line, *names):
    assert all(line[name] >= 0 for name in names), line
    assert sum(line[name] for name in names if name != "total_s") <= line["total_s"] + 0.001


def test_an_answer_has_its_counts_and_its_times(served, script, lines):
    served.engine.script = script(pieces=["a"] * 4, delay_s=0.05)
    reply = served.chat("hi", max_tokens=9)
    [line] = lines(1)
    usage = reply.json()["usage"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert (line["event"], line["level"], line["logger"]) == ("request", "info", "optimc.requests")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert line["answer_id"] == reply.json()["id"]
    assert line["request_id"] == reply.headers["x-request-id"]
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"] == 5
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert line["finish_reason"] == "stop"
    assert line["stream"] is False
    check_times(line, "queue_s", "prefill_s", "decode_s", "total_s")
    assert line["prefill_s"] >= 0.05
    assert line["decode_s"] >= 0.2
    assert "error" not in line
    assert "key" not in line


def test_a_stream_is_logged_after_its_last_byte(served, script, lines, caplog):
    served.engine.script = script(pieces=["a"] * 4, delay_s=0.05, finish="length", eos=False)
    with served.http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as reply:
        received = reply.iter_bytes()
        next(received)
        assert not [record for record in caplog.records if record.name == "optimc.requests"]
        assert b"[DONE]" in b"".join(received)
    [line] = lines(1)
    assert (line["status"], line["stream"], line["finish_reason"]) == (200, True, "length")
    assert line["output_tokens"] == 4
    assert line["total_s"] >= 0.2


def test_several_choices_are_one_line_and_the_prompt_counts_once(served, lines):
    reply = served.complete(["hi", "you"], n=2)
    [line] = lines(1)
    assert line["finish_reason"] == ["stop"] * 4
    assert line["prompt_tokens"] == reply.json()["usage"]["prompt_tokens"] == 5
    assert line["output_tokens"] == reply.json()["usage"]["completion_tokens"]
    check_times(line, "queue_s", "prefill_s", "decode_s", "total_s")


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [({"temperature": -1}, 400, None), ({"model": "other"}, 404, "model_not_found"), ({"n": 0}, 400, None)],
)
def test_what_is_refused_has_its_status_and_code(served, lines, fields, status, error):
    reply = served.complete("hi", **fields)
    [line] = lines(1)
    assert line["status"] == reply.status_code == status
    assert line.get("error") == reply.json()["error"]["code"] == error
    assert "queue_s" not in line
    assert "finish_reason" not in line


def test_a_full_queue_is_a_line(served, lines):
    served.engine.capacity = 0
    assert served.complete("hi").status_code == 429
    [line] = lines(1)
    assert (line["status"], line["error"], line["output_tokens"]) == (429, "overloaded", 0)


def test_a_failed_step_is_a_line(served, script, lines):
    served.engine.script = script(fail_after=1)
    assert served.complete("hi").status_code == 500
    served.complete("hi", stream=True)
    whole, streamed = lines(2)
    assert (whole["status"], whole["error"], whole["finish_reason"]) == (500, "engine_error", "error")
    assert (streamed["status"], streamed["error"], streamed["finish_reason"]) == (200, "engine_error", "error")


def test_keys_are_logged_by_name(start_server, engine, template, lines):
    with start_server(engine, template, ServerOptions(), keys=KeyRing.from_text(f"alice:{KEY}")) as served:
        served.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {KEY}"})
        served.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer " + "x" * 20})
        accepted, refused = lines(2)
    assert accepted["key"] == "alice"
    assert (refused["status"], refused["error"]) == (401, "invalid_api_key")
    assert "key" not in refused


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_one_line_with_what_it_got(served, script, lines, stream):
    served.engine.script = script(pieces=["a"] * 1000, delay_s=0.02)
    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    with served.connect() as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        while not served.engine.submitted or served.engine.submitted[0].sent_tokens < 5:
            time.sleep(0.01)
    [line] = lines(1)
    assert line["status"] == (200 if stream else 499)
    assert line["finish_reason"] == "abort"
    assert line["prompt_tokens"] == 2
    assert line["output_tokens"] >= 4
    check_times(line, "queue_s", "prefill_s", "total_s")
    assert "decode_s" not in line


def test_a_route_that_is_not_there_is_a_line_too(served, lines):
    assert served.http.get("/v2/models").status_code == 404
    assert served.http.get("/v1/completions").status_code == 405
    missing, wrong_method = lines(2)
    assert (missing["path"], missing["status"]) == ("/v2/models", 404)
    assert (wrong_method["method"], wrong_method["status"]) == ("GET", 405)


def test_probes_do_not_fill_the_log(served, lines):
    for path in ("/health", "/health/live", "/health/ready", "/metrics", "/dashboard.json"):
        assert served.http.get(path).status_code == 200
    served.http.get("/v1/models")
    [line] = lines(1)
    assert line["path"] == "/v1/models"


def test_no_text_of_a_prompt_or_an_answer_is_logged(served, script, lines, caplog):
    caplog.set_level(logging.DEBUG)
    served.engine.script = script(pieces=["answer-secret"])
    served.chat("prompt-secret", stop=["stop-secret"], user="user-secret", cache_salt="salt-secret")
    served.chat("prompt-secret", stream=True)
    served.chat("prompt-secret", temperature="value-secret")
    served.http.get("/v1/models?key=query-secret")
    lines(4)
    ours = [record for record in caplog.records if record.name.startswith("optimc")]
    assert "secret" not in "".join(JsonFormatter().format(record) for record in ours)


@pytest.mark.parametrize("wanted", ["abc-1.2_3", "A" * 64])
def test_a_clients_own_request_id_is_kept(served, lines, wanted):
    reply = served.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": wanted})
    assert reply.headers["x-request-id"] == wanted
    assert lines(1)[0]["request_id"] == wanted


@pytest.mark.parametrize("wanted", ["", "A" * 65, "two words", 'quote"', "new\tline", "ümlaut".encode("latin-1")])
def test_an_id_that_could_spoil_a_log_is_replaced(served, lines, wanted):
    reply = served.http.get("/v1/models", headers={"X-Request-Id": wanted})
    assert re.fullmatch(r"[0-9a-f]{32}", reply.headers["x-request-id"])
    assert lines(1)[0]["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/v2/nothing", "/v1/completions", "/"])
def test_every_reply_has_a_request_id(served, path):
    ids = {served.http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_hostile_path_stays_on_its_line(served, lines, caplog):
    served.http.get("/v1/models/%0a%22time%22%3a%0d%1b[2Jevil" + "x" * 500)
    [line] = lines(1)
    assert len(line["path"]) == 200
    record = [record for record in caplog.records if record.name == "optimc.requests"][-1]
    assert re.search(r"[\x00-\x1f]", record.getMessage()) is None


def test_what_went_wrong_inside_keeps_its_traceback_in_json(served, caplog):
    served.engine.submit_raises = ZeroDivisionError("ours")
    assert served.complete("hi").status_code == 500
    [record] = [record for record in caplog.records if record.exc_info]
    line = json.loads(JsonFormatter().format(record))
    assert line["level"] == "error"
    assert "ZeroDivisionError: ours" in line["exception"]
    assert "POST '/v1/completions' failed" in line["message"]


def test_other_messages_are_json_too():
    record = logging.LogRecord("a.b", logging.WARNING, __file__, 1, "%d of\n%s", (3, "ümlaut"), None)
    line = json.loads(JsonFormatter().format(record))
    assert {key: line[key] for key in ("level", "logger", "message")} == {
        "level": "warning",
        "logger": "a.b",
        "message": "3 of\nümlaut",
    }


def test_a_terminal_gets_words():
    assert str(LogEvent("request", {"path": "/v1/x", "s": 0.25, "r": ["a", None], "n": None, "q": 'a "b"\n'})) == (
        r'request path=/v1/x s=0.25 r="[\"a\",null]" n=null q="a \"b\"\n"'
    )


def test_times_of_several_choices_add_up():
    record = RequestRecord("r", "POST", "/p", "", arrived_s=99.0)
    record.accepted("cmpl-1", prompts=1, choices=3, stream=False, prompt_tokens=7)
    for index, (scheduled_s, first_s, finished_s) in enumerate([(101.0, 103.0, 104.0), (102.0, 102.5, 108.0)]):
        timings = Timings(100.0, scheduled_s, first_s, finished_s)
        record.add(index, RequestOutput(RequestId("x"), (), "", None, "length", Usage(7, 5, 2), timings))
    record.left()
    fields = record.fields()
    assert (fields["queue_s"], fields["prefill_s"], fields["decode_s"]) == (1.0, 1.5, 5.5)
    assert fields["finish_reason"] == ["length", "length", "abort"]
    assert (fields["prompt_tokens"], fields["output_tokens"], fields["cached_tokens"]) == (7, 10, 2)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("DELETE", "/v1/models", 405)])
def test_what_the_router_refuses_is_the_clients_fault_not_ours(served, lines, caplog, method, path, status):
    assert served.http.request(method, path).status_code == status
    [line] = lines(1)
    assert line["status"] == status
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
