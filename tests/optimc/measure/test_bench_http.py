"""The load generator against a stub server with an exact chunk plan on virtual time."""

import asyncio
import json
import re
import time

import httpx
import pytest

from optimc.errors import ConfigError, MeasureError
from optimc.measure.bench import bench_driver
from optimc.measure.http_driver import HttpDriver
from optimc.measure.workload import Workload

URL = "http://stub"


@pytest.fixture
def bench(virtual_time):
    def run(server, *, chat=False, url=URL, **options):
        driver = HttpDriver(url, virtual_time.clock, chat=chat, transport=server.transport)
        return virtual_time.run(bench_driver(driver, Workload(**options), virtual_time.clock, "run"))

    return run


def test_tokens_come_from_usage_not_from_chunks(bench, stub):
    pieces = [
        (0.1, stub.text("a")),
        (0.2, stub.text("b c d e f")),
        (0.3, stub.text("ghij")),
        (0.1, stub.text("kl", "length")),
        (0.5, stub.usage(32, 12)),  # late bookkeeping is no latency
        (0.0, stub.done),
    ]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, prompt_tokens=32, output_tokens=12, requests=1, warmup_requests=0)
    assert (result.output_tokens.median, result.token_source) == (12, "usage")
    assert result.tpot_ms.p50 == pytest.approx(600 / 11)
    assert result.e2e_ms.p50 == pytest.approx(700)
    assert result.itl_ms.n == 3


def test_ttft_is_the_first_content_not_the_first_byte(bench, stub):
    def delta(**fields):
        return stub.event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])

    pieces = [
        (0.010, delta(role="assistant", content="")),
        (0.010, delta()),
        (0.100, b": keep-alive\n\n"),
        (0.180, delta(content="Paris")),
        (0.100, stub.event(choices=[{"index": 0, "delta": {"content": "."}, "finish_reason": "stop"}])),
        (0.0, stub.usage(20, 2) + stub.done),
    ]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, chat=True, prompt_tokens=16, output_tokens=2, requests=1, warmup_requests=0)
    assert result.ttft_ms.p50 == pytest.approx(300)
    assert set(server.paths) == {"/v1/chat/completions"}


def test_a_hundred_spaces_are_a_hundred_tokens(bench, stub):
    pieces = [(0.1, stub.text(" " * 50)), (0.1, stub.text(" " * 50, "length")), (0, stub.usage(16, 100) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, prompt_tokens=16, output_tokens=100, requests=1, warmup_requests=0)
    assert result.output_tokens.median == 100


def test_missing_usage_is_a_labelled_estimate(bench, stub):
    pieces = [(0.1, stub.text("a")), (0.1, stub.text("b", "length")), (0, stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, prompt_tokens=16, output_tokens=2, requests=2, warmup_requests=0)
    assert (result.output_tokens.median, result.token_source) == (2, "estimate")
    assert "the server sends no usage: tokens are estimated as chunks" in result.warnings
    assert (result.prompt_tokens, result.prefill_tokens_per_s, result.prefix_hit_rate) == (None, None, None)


def test_every_kind_of_failure_is_counted_and_excluded(bench, stub):
    good = [(0.1, stub.text("a")), (0.1, stub.text("b", "length")), (0, stub.usage(16, 2) + stub.done)]
    cut = httpx.RemoteProtocolError("peer closed connection")

    def answer(number, body):
        kind = number % 20
        if kind in (0, 1):
            return 503, [(0, b'{"error": {"message": "busy"}}')]
        return 200, {
            2: [(0.001, stub.text("a")), (0.001, cut)],
            3: [(0.001, stub.text("a")), (0.001, stub.event(error={"message": "engine died"}) + stub.done)],
            4: [(0.001, stub.text("", "stop") + stub.usage(16, 0) + stub.done)],
        }.get(kind, good)

    server = stub.Server(answer)
    result = bench(server, prompt_tokens=16, output_tokens=2, requests=100, warmup_requests=0)
    assert result.failures == {
        "HTTP 503: busy": 10,
        "RemoteProtocolError: peer closed connection": 5,
        "error event: engine died": 5,
        "empty output": 5,
    }
    assert not result.ok
    assert result.ttft_ms.n == 75
    assert (result.ttft_ms.p50, result.ttft_ms.p90) == (pytest.approx(100), pytest.approx(100))


def test_a_refusal_in_no_words_at_all_fails_its_request_only(bench, stub):
    good = [(0.1, stub.text("a", "length")), (0, stub.usage(16, 1) + stub.done)]
    server = stub.Server(lambda number, body: (503, [(0, b"[" * 100_000)]) if number == 1 else (200, good))
    result = bench(server, prompt_tokens=16, output_tokens=2, requests=4, warmup_requests=0)
    assert result.failures == {"HTTP 503: " + "[" * 200: 1}


def test_a_stream_without_finish_reason_is_a_failure_however_clean_it_ends(bench, stub):
    pieces = [(0.1, stub.text("a")), (0, stub.usage(16, 1) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    with pytest.raises(MeasureError, match="the stream ended without a finish reason"):
        bench(server, prompt_tokens=16, output_tokens=2, requests=1, warmup_requests=0)


def test_tokens_without_content_are_a_failure(bench, stub):
    pieces = [(0.1, stub.text("", "length") + stub.usage(16, 7) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    with pytest.raises(MeasureError, match="claims 7 tokens, delivered no content"):
        bench(server, prompt_tokens=16, output_tokens=7, requests=1, warmup_requests=0)


def test_steady_throughput_counts_straddling_requests(bench, stub):
    def answer(number, body):
        count = body["max_tokens"]
        pieces = [(1.0 if i == 0 else 0.1, stub.text("x", "length" if i == count - 1 else None)) for i in range(count)]
        return 200, [*pieces, (0, stub.usage(16, count) + stub.done)]

    server = stub.Server(answer)
    result = bench(server, prompt_tokens=16, output_tokens=10, concurrency=4, requests=40)
    assert result.output_tokens_per_s == pytest.approx(4 * 10 / 1.9, rel=0.02)


def test_servers_that_take_ids_get_ids_of_exact_length(bench, stub):
    pieces = [(0.1, stub.text("a", "stop")), (0, stub.usage(40, 1) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, url="http://stub/v1/", prompt_tokens=40, output_tokens=3, requests=2)
    assert all(len(body["prompt"]) == 40 and min(body["prompt"]) >= 300 for body in server.bodies)
    body = server.bodies[0]
    assert (body["model"], body["stream_options"], body["ignore_eos"]) == ("stub", {"include_usage": True}, True)
    assert "asked for 3 output tokens, got 1" in result.warnings


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampled_requests_say_so_and_have_seeds_of_their_own(bench, stub, temperature):
    pieces = [(0.1, stub.text("a", "length")), (0, stub.usage(16, 2) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    bench(server, prompt_tokens=16, output_tokens=2, requests=3, warmup_requests=1, temperature=temperature)
    assert {body["temperature"] for body in server.bodies} == {temperature}
    seeds = [body.get("seed") for body in server.bodies]
    assert seeds == ([None] * 4 if temperature == 0 else [0, 1, 2, 3])


def test_servers_that_take_text_get_words_calibrated_to_the_length(bench, stub):
    pieces = [(0.1, stub.text("a", "length"))]
    server = stub.Server(lambda number, body: (200, [*pieces, (0, stub.usage(server.count(body["prompt"]), 2))]))
    server.takes_ids = False
    server.words_per_token = 0.5
    result = bench(server, prompt_tokens=200, output_tokens=2, requests=2)
    assert abs(result.prompt_tokens.median - 200) <= 2
    assert "prompts are English words, their length in tokens is approximate" in result.warnings


def test_hit_rate_comes_from_the_server(bench, stub):
    pieces = [(0.1, stub.text("a", "length")), (0, stub.usage(64, 2, cached=48) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, prompt_tokens=64, output_tokens=2, requests=2)
    assert result.prefix_hit_rate == 0.75
    assert any("75.0% of prompt tokens came from the prefix cache (not asked for)" in w for w in result.warnings)


def test_no_server_is_one_clear_line(virtual_time):
    def refuse(request):
        raise httpx.ConnectError("connection refused")

    driver = HttpDriver(URL, virtual_time.clock, transport=httpx.MockTransport(refuse))
    with pytest.raises(MeasureError, match=r"http://stub/v1/models gives no model name .* is the server up\?"):
        virtual_time.run(bench_driver(driver, Workload(), virtual_time.clock, "run"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"choices": ["x"]}, "choice is str, not dict"),
        ({"choices": 7}, "choices is int, not list"),
        ({"choices": [{"delta": "a"}]}, "delta is str, not dict"),
        ({"choices": [{"text": {"a": 1}}]}, "text is dict, not str"),
        ({"choices": [], "usage": "lots"}, "usage is str, not dict"),
        ({"choices": [], "usage": {"completion_tokens": "x"}}, "completion_tokens is str, not int"),
        ({"choices": [], "usage": {"completion_tokens": -3}}, "completion_tokens is -3"),
        ({"choices": [], "usage": {"prompt_tokens": True}}, "prompt_tokens is True"),
        ({"choices": [], "usage": {"prompt_tokens_details": [1]}}, "prompt_tokens_details is list, not dict"),
    ],
)
def test_an_event_the_protocol_does_not_have_fails_its_request_only(bench, stub, fields, told):
    good = [(0.1, stub.text("a", "length")), (0, stub.usage(16, 1) + stub.done)]
    odd = [(0.1, stub.event(**fields)), *good]
    server = stub.Server(lambda number, body: (200, odd if number == 1 else good))
    result = bench(server, prompt_tokens=16, output_tokens=2, requests=4, warmup_requests=0)
    assert result.num_failures == 1
    (reason,) = result.failures
    assert f"an event is none of a completion ({told})" in reason


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://[::1", "ftp://stub", "http://stub:99999", "http://"])
def test_what_is_no_address_is_refused_by_its_option(bench, stub, url):
    with pytest.raises(ConfigError, match="--url"):
        bench(stub.Server(lambda number, body: (200, [])), url=url)


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused(virtual_time, key):
    driver = HttpDriver(URL, virtual_time.clock, api_key=key)
    with pytest.raises(ConfigError, match="--api-key"):
        virtual_time.run(bench_driver(driver, Workload(), virtual_time.clock, "run"))


def test_a_server_that_wants_a_key_says_so_in_one_line(virtual_time):
    transport = httpx.MockTransport(lambda request: httpx.Response(401, json={"error": {"message": "bad key"}}))
    driver = HttpDriver(URL, virtual_time.clock, transport=transport)
    with pytest.raises(MeasureError, match=r"\(HTTP 401: bad key\); --api-key gives a key$"):
        virtual_time.run(bench_driver(driver, Workload(), virtual_time.clock, "run"))


def test_a_server_of_short_prompts_gets_shorter_probes(bench, stub):
    class ShortServer(stub.Server):
        def __init__(self):
            super().__init__(
                lambda number, body: (200, [(0.1, stub.text("a", "length")), (0, stub.usage(20, 1) + stub.done)])
            )
            self.asked = []

        async def _handle(self, request):
            if request.url.path == "/v1/models":
                return await super()._handle(request)
            words = len(json.loads(request.content)["messages"][0]["content"].split())
            self.asked.append(words)
            if words > 100:
                return httpx.Response(400, json={"error": {"message": "too long"}})
            pieces = [(0.1, stub.text("a", "length")), (0, stub.usage(3 + 2 * words, 1) + stub.done)]
            return httpx.Response(200, content=b"".join(piece for _, piece in pieces))

    server = ShortServer()
    result = bench(server, chat=True, prompt_tokens=63, output_tokens=1, requests=2, warmup_requests=0)
    # One word more than asked for begins every text: 17, 257, 129, 65 words are probed.
    assert [words - 1 for words in server.asked[:4]] == [16, 256, 128, 64]
    assert result.prompt_tokens.median == pytest.approx(63, abs=4)


@pytest.mark.parametrize("field", [{"reasoning_content": "hm"}, {"reasoning": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_thoughts_and_tool_calls_are_tokens_too(bench, stub, field):
    def delta(finish=None, **fields):
        return stub.event(choices=[{"index": 0, "delta": fields, "finish_reason": finish}])

    pieces = [(0.1, delta(**field)), (0.2, delta(**field)), (0.1, delta("stop")), (0, stub.usage(20, 4) + stub.done)]
    server = stub.Server(lambda number, body: (200, pieces))
    result = bench(server, chat=True, prompt_tokens=16, output_tokens=4, requests=2, warmup_requests=0)
    assert result.num_failures == 0
    assert (result.ttft_ms.p50, result.tpot_ms.p50) == (pytest.approx(100), pytest.approx(100))


class ClosingServer:
    """Answers `answers` requests on each connection, then closes it when the next one arrives, without a word."""

    def __init__(self, stub, answers):
        self.connections = self.dropped = 0
        self._answers = answers
        events = [stub.text("a"), stub.text("b", "length"), stub.usage(16, 2), stub.done]
        self._body = b"".join(events)

    async def serve(self, reader, writer):
        self.connections += 1
        for _ in range(self._answers):
            if await self._request(reader) is None:
                break
            head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(self._body)}\r\n\r\n"
            writer.write(head.encode() + self._body)
            await writer.drain()
        else:
            self.dropped += await self._request(reader) is not None
        writer.close()

    @staticmethod
    async def _request(reader):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        return await reader.readexactly(int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1]))


@pytest.mark.parametrize("answers", [0, 1, 3])
def test_a_connection_closed_between_two_requests_fails_none_of_them(stub, answers):
    closing = ClosingServer(stub, answers)

    async def measure():
        async with await asyncio.start_server(closing.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            driver = HttpDriver(f"http://127.0.0.1:{port}", time.perf_counter, model="m")
            workload = Workload(prompt_tokens=16, output_tokens=2, requests=6, warmup_requests=0, concurrency=1)
            return await bench_driver(driver, workload, time.perf_counter, "run")

    if answers == 0:  # a new connection that says nothing is a server that fails: it is not asked for ever
        with pytest.raises(MeasureError, match="Server disconnected without sending a response"):
            asyncio.run(measure())
        assert closing.connections < 10
    else:
        result = asyncio.run(measure())
        assert (result.num_failures, result.requests) == (0, 6)
        assert closing.dropped > 0
