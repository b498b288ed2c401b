"""What is sent: lengths, files, traces and conversations, in process and over HTTP."""

import io
from itertools import combinations

import pytest
from rich.console import Console

from optimc.errors import ConfigError, MeasureError, OverloadedError, RequestError
from optimc.measure.bench import bench_driver
from optimc.measure.http_driver import HttpDriver
from optimc.measure.load.dataset import LinesDataset, RandomDataset, TurnsDataset, lines_dataset, sized_by
from optimc.measure.load.traffic import TrafficLine
from optimc.measure.prompts import HASH_TOKENS, ChatPrompt, IdPrompts, LengthOnly, usable_ids
from optimc.measure.workload import Workload

HELLO = ({"role": "user", "content": "Hi"},)


TURNS = {"dataset": "turns", "turns": 2, "turn_tokens": 4, "prompt_tokens": 16}


def ids_source(**options):
    return IdPrompts(Workload(**options), "run", usable_ids(384, {1, 2}))


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def http_bench(virtual_time):
    def run(server, *, calls=None, chat=False, **options):
        driver = HttpDriver("http://stub", virtual_time.clock, chat=chat, transport=server.transport)
        workload = Workload(**{"output_tokens": 2, **options})
        return virtual_time.run(bench_driver(driver, workload, virtual_time.clock, "run", dataset=calls))

    return run


@pytest.fixture
def answering(stub):
    """A server that answers every request with `text`."""

    def make(text="blue "):
        pieces = [(0.1, stub.text(text)), (0.1, stub.text("sky", "length")), (0, stub.usage(16, 2) + stub.done)]
        chat_pieces = [
            (0.1, stub.event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": None}])),
            (0.1, stub.event(choices=[{"index": 0, "delta": {"content": "sky"}, "finish_reason": "stop"}])),
            (0, stub.usage(16, 2) + stub.done),
        ]
        return stub.Server(lambda number, body: (200, chat_pieces if "messages" in body else pieces))

    return make


def test_spread_lengths_are_even_repeatable_and_within_the_spread():
    options = {"prompt_tokens": 100, "prompt_spread": 0.5, "output_tokens": 20, "output_spread": 0.25}
    first, second = (RandomDataset(ids_source(**options), Workload(**options)) for _ in range(2))
    calls = [first(index) for index in range(200)]
    assert calls == [second(index) for index in range(200)]
    lengths = [len(call.prompt) for call in calls]
    assert (min(lengths) >= 50, max(lengths) <= 150) == (True, True)
    # even in 50 .. 150: standard deviation 29.2, so the mean of 200 lies within 3 * 29.2 / sqrt(200) = 6.2 of 100
    assert sum(lengths) / 200 == pytest.approx(100, abs=6.2)
    assert {call.output_tokens for call in calls} == set(range(15, 26))
    assert first.longest_tokens == 150 + 25


def test_a_file_is_sent_in_turn_with_its_own_answer_lengths(load_run, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01))
    calls = LinesDataset([([5, 6], 3, None), ([7, 8, 9], 4, None)], is_scheduled=False)
    load_run(engine, calls=calls, requests=4, warmup_requests=0)
    assert engine.prompts[:4] == [[5, 6], [7, 8, 9], [5, 6], [7, 8, 9]]
    assert [params.max_tokens for params in engine.params[:4]] == [3, 4, 3, 4]


def test_a_lines_own_length_goes_before_the_loads():
    lines = [TrafficLine(1, prompt="a", output_tokens=5, max_tokens=9), TrafficLine(2, prompt="b", max_tokens=9)]
    dataset = lines_dataset([*lines, TrafficLine(3, prompt="c")], Workload(dataset="file", output_tokens=128))
    assert [dataset(index).output_tokens for index in range(3)] == [5, 9, 128]


def test_a_trace_is_sent_at_its_moments_and_nothing_of_it_before(load_run, scripted_engine, steady_script):
    # 10 requests, 0, 1, 4, 9, .. tenths of a second after the first; twice as fast as recorded
    moments = [50 + k * k / 10 for k in range(10)]
    calls = LinesDataset([([k + 10] * 40, 2, at_s) for k, at_s in enumerate(moments)], is_scheduled=True)
    engine = scripted_engine(steady_script(0.1, 0.01))
    run = load_run(engine, calls=calls, dataset="trace", arrival="trace", rate_scale=2.0, requests=10)
    sent = sorted(exchange.sent_s - run.steady_start_s for exchange in run.measured)
    assert sent == pytest.approx([k * k / 20 for k in range(10)])
    recorded = [prompt for prompt in engine.prompts if len(set(prompt)) == 1]
    assert recorded == [[k + 10] * 40 for k in range(10)]
    assert {len(prompt) for prompt in engine.prompts} == {40}  # warm-up and fillers are as long


def test_a_trace_says_how_many_requests_it_has():
    trace = Workload(arrival="trace", dataset="trace")
    dataset = LinesDataset([([5], 2, 0.0), ([6], 2, 1.0)], is_scheduled=True)
    assert sized_by(trace, dataset).num_requests == 2
    with pytest.raises(ConfigError, match="3, and the trace has 2"):
        sized_by(Workload(arrival="trace", dataset="trace", requests=3), dataset)


def test_a_trace_without_moments_is_refused_line_by_line():
    lines = [TrafficLine(4, prompt="a"), TrafficLine(7, prompt="b"), TrafficLine(8, prompt="c", at_s=1.0)]
    with pytest.raises(ConfigError) as caught:
        lines_dataset(lines, Workload(arrival="trace", dataset="trace"))
    assert [fault.where for fault in caught.value.faults] == ["line 4", "line 7"]


def test_equal_hashes_are_equal_blocks_and_the_rest_is_each_requests_own():
    source = ids_source()
    first = source.of_length(0, LengthOnly(2 * HASH_TOKENS + 100, (7, 8)))
    second = source.of_length(1, LengthOnly(2 * HASH_TOKENS + 50, (7, 9)))
    third = source.of_length(2, LengthOnly(2 * HASH_TOKENS + 50, (7, 8)))
    assert [len(first), len(second)] == [2 * HASH_TOKENS + 100, 2 * HASH_TOKENS + 50]
    assert common(first, second) == pytest.approx(HASH_TOKENS, abs=2)  # ids of the next block may agree by chance
    assert common(first, third) == 2 * HASH_TOKENS
    assert source.of_length(0, LengthOnly(700, (7, 8))) == first[:700]  # the last hash is of a part of a block


def test_too_long_a_line_is_refused_before_anything_runs(load_run, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01), max_seq_len=100)
    calls = LinesDataset([([5] * 90, 11, None)], is_scheduled=False)
    with pytest.raises(MeasureError, match="the longest prompt with its answer = 101, the plan takes 100"):
        load_run(engine, calls=calls)
    assert engine.prompts == []


def test_conversations_that_grow_too_long_are_refused(load_run, scripted_engine, steady_script):
    engine = scripted_engine(steady_script(0.1, 0.01), max_seq_len=100)
    with pytest.raises(MeasureError, match="= 101, the plan"):  # 40 + 10 + 41 + 10
        load_run(engine, dataset="turns", turns=2, turn_tokens=41, prompt_tokens=40, output_tokens=10)


@pytest.mark.parametrize("load", [{"concurrency": 2, "warmup_requests": 0}, {"arrival": "poisson", "rate_per_s": 0.2}])
def test_later_turns_carry_what_was_answered(load_run, scripted_engine, steady_script, load):
    engine = scripted_engine(steady_script(0.1, 0.01))
    load_run(engine, dataset="turns", turns=3, turn_tokens=8, prompt_tokens=32, output_tokens=5, requests=20, **load)
    # The engine answers 7 7 7 7 7. Turns are 32, 32 + 5 + 8 and 32 + 2 * 13 tokens long.
    assert {len(prompt) for prompt in engine.prompts} == {32, 45, 58}
    firsts = {tuple(prompt) for prompt in engine.prompts if len(prompt) == 32}
    seconds = {tuple(prompt) for prompt in engine.prompts if len(prompt) == 45}
    for prompt in engine.prompts:
        if len(prompt) >= 45:
            assert tuple(prompt[:32]) in firsts
            assert prompt[32:37] == [7] * 5
        if len(prompt) == 58:
            assert tuple(prompt[:45]) in seconds
            assert prompt[45:50] == [7] * 5


def test_conversations_share_nothing_but_the_shared_prefix():
    workload = Workload(dataset="turns", turns=3, concurrency=4, prompt_tokens=80, shared_prefix_tokens=48)
    dataset = TurnsDataset(IdPrompts(workload, "run", usable_ids(384, {1, 2})), workload)
    calls = [dataset(index) for index in range(40)]
    opening = {call.conversation: call.prompt for call in calls if call.turn == 0}
    assert {common(a, b) for a, b in combinations(opening.values(), 2)} == {48}


def test_conversations_stand_at_different_turns():
    workload = Workload(dataset="turns", turns=4, concurrency=4)
    dataset = TurnsDataset(ids_source(), workload)
    for step in range(4, 12):
        assert {dataset(4 * step + lane).turn for lane in range(4)} == {0, 1, 2, 3}


def test_a_failed_turn_ends_its_conversation_and_the_rest_is_shown(bench, scripted_engine, steady_script):
    # One client, conversations of three turns, no warm-up. The second turn of the first one fails: its third is not
    # sent. Measured are nine calls: 2 sent of the first conversation, 3 of each other.
    steady = steady_script(0.1, 0.01)

    def script(number, prompt_ids, max_tokens):
        if number == 1:
            raise OverloadedError("queue full")
        return steady(number, prompt_ids, max_tokens)

    result = bench(scripted_engine(script), dataset="turns", turns=3, turn_tokens=4, requests=9, warmup_requests=0)
    assert (result.requests, result.num_failures, result.not_sent) == (8, 1, 1)
    assert any(warning.startswith("1 later turns were not sent") for warning in result.warnings)


def test_a_load_of_which_no_turn_could_be_sent_says_why(bench, scripted_engine):
    def refuse(number, prompt_ids, max_tokens):
        raise OverloadedError("queue full")

    # The cold start is the first turn of the only conversation.
    with pytest.raises(MeasureError, match="all 3 requests failed; 3 with: not sent, as an earlier turn failed"):
        bench(scripted_engine(refuse), dataset="turns", turns=9, turn_tokens=4, requests=3, warmup_requests=1)


def test_waiting_for_an_answer_is_thought_not_latency(load_run, scripted_engine, steady_script):
    # Answers take 30 s, turns are due every 10 s: later turns wait for their predecessors, not counted as latency.
    engine = scripted_engine(steady_script(0.1, 29.9))
    options = {"arrival": "constant", "rate_per_s": 1.0, "requests": 30, "warmup_requests": 1}
    run = load_run(engine, dataset="turns", turns=3, turn_tokens=4, **options)
    assert [exchange.ttft_s for exchange in run.measured] == pytest.approx([0.1] * 30)


def test_turns_over_http_are_messages_with_the_real_answers(http_bench, answering):
    server = answering()
    http_bench(server, chat=True, requests=4, warmup_requests=0, **TURNS)
    messages = [body["messages"] for body in server.bodies]
    assert [[message["role"] for message in each] for each in messages[:2]] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert messages[1][0] == messages[0][0]
    assert messages[1][1]["content"] == "blue sky"


def test_turns_of_completions_are_one_text(http_bench, answering):
    server = answering()
    http_bench(server, requests=4, warmup_requests=0, **TURNS)
    first, second = (body["prompt"] for body in server.bodies[:2])
    assert second.startswith(first + "blue sky ")


def test_a_files_messages_go_to_chat_and_its_prompts_to_completions(http_bench, answering):
    server = answering()
    calls = LinesDataset([(ChatPrompt(HELLO, ({"type": "function"},)), 2, None), ("Once", 2, None)], is_scheduled=False)
    http_bench(server, calls=calls, requests=2, warmup_requests=0)
    assert server.paths == ["/v1/chat/completions", "/v1/completions"]
    assert (server.bodies[0]["messages"], server.bodies[0]["tools"]) == (list(HELLO), [{"type": "function"}])
    assert server.bodies[1]["prompt"] == "Once"
    assert server.probes == 0  # nothing had to be made up


def test_a_traces_lengths_are_filled_over_http_too(http_bench, answering):
    server = answering()
    calls = LinesDataset([(LengthOnly(600, (3,)), 2, None), (LengthOnly(700, (3,)), 2, None)], is_scheduled=False)
    http_bench(server, calls=calls, requests=2, warmup_requests=0)
    first, second = (body["prompt"] for body in server.bodies)
    assert (len(first), len(second)) == (600, 700)
    assert first[:HASH_TOKENS] == second[:HASH_TOKENS]


def test_lines_an_engine_cannot_take_are_all_named():
    def encode(line):
        if line.messages:
            raise RequestError("chat template: no content")
        return list(line.prompt)

    lines = [
        TrafficLine(1, prompt=(1,) * 8),
        TrafficLine(2, prompt=(1,) * 9),
        TrafficLine(4, messages=HELLO),
        TrafficLine(5, prompt_tokens=3, output_tokens=8),
    ]
    with pytest.raises(ConfigError) as caught:
        lines_dataset(lines, Workload(dataset="file", output_tokens=2), encode, max_tokens=10)
    assert [(fault.where, fault.message) for fault in caught.value.faults] == [
        ("line 2", "9 prompt + 2 output tokens, the plan takes 10"),
        ("line 4", "chat template: no content"),
        ("line 5", "3 prompt + 8 output tokens, the plan takes 10"),
    ]


def test_token_ids_are_no_chat(http_bench, answering):
    calls = LinesDataset([([1, 2, 3], 2, None)], is_scheduled=False)
    with pytest.raises(ConfigError, match="--chat: takes text"):
        http_bench(answering(), calls=calls, chat=True, dataset="file", prompts="x.jsonl")


def test_the_headline_of_a_file_names_the_output_that_was_made(bench, scripted_engine, steady_script):
    calls = LinesDataset([([1, 2, 3], 5, None), ([4, 5, 6], 7, None)], is_scheduled=False)
    engine = scripted_engine(steady_script(0.1, 0.01))
    result = bench(engine, calls=calls, dataset="file", prompts="x.jsonl", requests=4, output_tokens=128)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(result.table())
    shown = console.export_text()
    assert "prompts of x.jsonl, 5 / 7 / 7 output tokens, concurrency 1" in shown
    assert "128" not in shown.splitlines()[0]
