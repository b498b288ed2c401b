"""The engine on the scripted executor, mostly stepped by hand so that the order of events is the test's."""

import random
import threading
import time

import numpy as np
import pytest

from optimc.errors import ConfigError, EngineError, OverloadedError, RequestError
from optimc_runtime.config import EngineConfig
from optimc_runtime.request import SamplingParams
from optimc_runtime.sampler import SamplingState, sample

GREEDY = SamplingParams(temperature=0)


def greedy(count: int | None, **options) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, **options)


class Inbox:
    """Collects one request's outputs."""

    def __init__(self):
        self.outputs = []

    def __call__(self, output):
        self.outputs.append(output)

    @property
    def token_ids(self):
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self):
        return "".join(output.text for output in self.outputs)

    @property
    def reason(self):
        reasons = [output.finish_reason for output in self.outputs if output.finish_reason is not None]
        assert len(reasons) <= 1
        assert not reasons or self.outputs[-1].finish_reason is not None
        return reasons[0] if reasons else None


def submit(engine, prompt, params, **options) -> Inbox:
    inbox = Inbox()
    inbox.request_id = engine.submit(prompt, params, on_output=inbox, **options)
    return inbox


def run(engine, max_steps=20_000):
    steps = 0
    while engine.step():
        steps += 1
        assert steps < max_steps
    assert_idle(engine)


def assert_idle(engine):
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert not engine._unfinished


def alone(scripted, prompt, params, vocab_size=64) -> list[int]:
    """What the request must get: the reference logits and the sampler, no engine."""
    state = SamplingState(params, prompt, frozenset(), vocab_size, params.seed or 0)
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = scripted.logits(tokens, vocab_size)[-1:]
        tokens.append(sample(logits, [state])[0].token_id)
        state.accept(tokens[-1])
    return tokens[len(prompt) :]


@pytest.mark.parametrize("num_blocks", [400, 20], ids=["roomy pool", "preempting pool"])
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_64_concurrent_requests_of_mixed_lengths_equal_each_alone(make_engine, scripted, num_blocks, seeded):
    engine = make_engine(num_blocks=num_blocks, max_seqs=64, max_step_tokens=96, max_seq_len=80)
    rng = random.Random(0)
    expected, inboxes = [], []
    for i in range(64):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 30),
            temperature=1.0 if seeded else 0.0,
            seed=i if seeded else None,
            repetition_penalty=1.1 if seeded and i % 2 else 1.0,
        )
        expected.append(alone(scripted, prompt, params))
        inboxes.append(submit(engine, prompt, params))
        if i % 3 == 0:
            engine.step()
    run(engine)
    assert [inbox.token_ids for inbox in inboxes] == expected
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert (engine.stats().preemptions > 0) == (num_blocks == 20)


@pytest.mark.parametrize(
    "switches",
    [{"prefix_cache": False}, {"chunked_prefill": False}, {"inflight_batching": False}],
    ids=lambda switches: next(iter(switches)),
)
def test_each_switch_off_gives_the_same_answers(make_engine, scripted, switches):
    engine = make_engine(EngineConfig(**switches), max_step_tokens=16)
    prompts = [[i % 5] * (1 + i % 16) for i in range(20)]
    inboxes = [submit(engine, prompt, greedy(6)) for prompt in prompts]
    run(engine)
    assert [inbox.token_ids for inbox in inboxes] == [scripted.greedy(prompt, 6) for prompt in prompts]


# How a request ends


@pytest.mark.parametrize("eos", [7, 8, 9])
def test_any_eos_ends_with_stop_and_stays_out_of_the_text(make_engine, byte_tokenizer, eos):
    engine = make_engine(vocab_size=257, eos=(7, 8, 9), tokenizer=byte_tokenizer)
    engine.executor.script = {0: ord("h"), 1: ord("i"), 2: eos}
    inbox = submit(engine, [1], greedy(10))
    run(engine)
    assert (inbox.text, inbox.token_ids, inbox.reason) == ("hi", [104, 105, eos], "stop")
    assert inbox.outputs[-1].usage.output_tokens == 3


def test_min_tokens_holds_back_every_stop_token(make_engine):
    engine = make_engine(eos=(7, 8))
    engine.executor.script = {0: 7, 1: 8, 2: 9, 3: 7}
    inbox = submit(engine, [1], greedy(10, min_tokens=3, stop_token_ids=(9,)))
    run(engine)
    assert not {7, 8, 9} & set(inbox.token_ids[:3])
    assert (inbox.token_ids[3:], inbox.reason) == ([7], "stop")


def test_ignore_eos_runs_to_the_end(make_engine):
    engine = make_engine(eos=(7,))
    engine.executor.script = {0: 7}
    inbox = submit(engine, [1], greedy(4, ignore_eos=True))
    run(engine)
    assert (inbox.token_ids[0], len(inbox.token_ids), inbox.reason) == (7, 4, "length")


def test_stop_token_ids_end_a_request_even_with_ignore_eos(make_engine):
    engine = make_engine(eos=(7,))
    engine.executor.script = {0: 7, 1: 12}
    inbox = submit(engine, [1], greedy(4, ignore_eos=True, stop_token_ids=(12,)))
    run(engine)
    assert (inbox.token_ids, inbox.reason) == ([7, 12], "stop")


def scripted_text(make_engine, byte_tokenizer, text, config=None):
    engine = make_engine(config, vocab_size=257, tokenizer=byte_tokenizer, max_seq_len=120)
    engine.executor.script = dict(enumerate(text.encode()))
    return engine


def test_a_stop_string_is_cut_with_all_that_follows(make_engine, byte_tokenizer):
    engine = scripted_text(make_engine, byte_tokenizer, "one two three")
    inbox = submit(engine, [1], greedy(20, stop=("two",)))
    run(engine)
    assert (inbox.text, inbox.reason) == ("one ", "stop")
    assert len(inbox.token_ids) == len("one two")


def test_text_held_back_for_a_stop_string_is_delivered_in_the_end(make_engine, byte_tokenizer):
    engine = scripted_text(make_engine, byte_tokenizer, "one twO")
    inbox = submit(engine, [1], greedy(6, stop=("two",)))
    run(engine)
    assert (inbox.text, inbox.reason) == ("one tw", "length")


def test_no_stop_string_before_min_tokens(make_engine, byte_tokenizer):
    engine = scripted_text(make_engine, byte_tokenizer, "ab ab ab")
    inbox = submit(engine, [1], greedy(8, stop=("ab",), min_tokens=3))
    run(engine)
    assert (inbox.text, inbox.reason) == ("ab ", "stop")


def test_a_cut_in_mid_character_flushes_it_as_invalid(make_engine, byte_tokenizer):
    engine = scripted_text(make_engine, byte_tokenizer, "a😀")
    inbox = submit(engine, [1], greedy(3))
    run(engine)
    assert inbox.text == byte_tokenizer.decode(inbox.token_ids) == "a\ufffd"
    assert all("\ufffd" not in output.text for output in inbox.outputs[:-1])


def test_zero_tokens_compute_the_prompt_only(make_engine):
    engine = make_engine()
    inbox = submit(engine, [1] * 20, greedy(0))
    run(engine)
    assert (inbox.token_ids, inbox.reason, len(inbox.outputs)) == ([], "length", 1)
    assert engine.stats().prompt_tokens == 20


def test_without_max_tokens_a_request_fills_what_the_limits_leave(make_engine):
    engine = make_engine(num_blocks=8, max_seq_len=64)
    inbox = submit(engine, [1] * 10, GREEDY)
    run(engine)
    assert (len(inbox.token_ids), inbox.reason) == (22, "length")


def test_usage_timings_and_logprobs_are_reported(make_engine, scripted):
    engine = make_engine()
    submit(engine, [1] * 9, greedy(2))
    run(engine)
    inbox = submit(engine, [1] * 9, greedy(3, logprobs=2))
    run(engine)
    last = inbox.outputs[-1]
    assert (last.usage.prompt_tokens, last.usage.output_tokens, last.usage.cached_tokens) == (9, 3, 8)
    times = last.timings
    assert times.arrival_s <= times.scheduled_s <= times.first_token_s <= times.finished_s
    assert [len(output.logprobs) for output in inbox.outputs] == [1, 1, 1]
    logits = scripted.logits([1] * 9, 64)[-1].astype(np.float64)
    best = inbox.outputs[0].logprobs[0]
    assert best.token_id == best.top[0][0] == logits.argmax()
    assert best.logprob == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-4)


# What is refused


def test_a_request_that_can_never_fit_is_refused_and_blocks_nobody(make_engine):
    engine = make_engine(num_blocks=8, max_seq_len=64)
    for length in (31, 32, 33, 63, 64, 65):
        with pytest.raises(RequestError):
            submit(engine, [1] * length, greedy(10_000))
    small = submit(engine, [1, 2, 3], greedy(3))
    for _ in range(3):
        engine.step()
    assert small.reason == "length"
    assert_idle(engine)


def test_ids_outside_the_vocabulary_are_refused_by_field(make_engine):
    engine = make_engine()
    for params, field in (
        (greedy(1, stop_token_ids=(64,)), "stop_token_ids"),
        (greedy(1, logit_bias={64: 1.0}), "logit_bias"),
        (greedy(1, stop=("x",)), "stop"),
    ):
        with pytest.raises(RequestError) as caught:
            submit(engine, [1], params)
        assert caught.value.param == field


def test_a_request_id_in_use_is_refused_and_free_again_after_the_end(make_engine):
    engine = make_engine()
    submit(engine, [1], greedy(2), request_id="a")
    with pytest.raises(RequestError, match="'a' is in use"):
        submit(engine, [1], greedy(2), request_id="a")
    run(engine)
    again = submit(engine, [1], greedy(2), request_id="a")
    run(engine)
    assert again.reason == "length"


def test_a_full_queue_refuses_at_once_and_accepted_requests_finish(make_engine):
    engine = make_engine(EngineConfig(max_seqs=2, max_queued_requests=4))
    accepted, refused = [], 0
    for _ in range(50):
        try:
            accepted.append(submit(engine, [1], greedy(3)))
        except OverloadedError:
            refused += 1
    assert (len(accepted), refused) == (6, 44)
    run(engine)
    assert {inbox.reason for inbox in accepted} == {"length"}


def test_the_queue_is_bounded_in_tokens_but_never_closed_to_a_lone_request(make_engine):
    engine = make_engine(EngineConfig(max_queued_tokens=10))
    submit(engine, [1] * 30, greedy(1))
    with pytest.raises(OverloadedError, match="30 prompt tokens are waiting; 1 more would exceed 10"):
        submit(engine, [1], greedy(1))
    engine.step()
    submit(engine, [1], greedy(1))
    run(engine)


def test_options_beyond_the_plan_stop_the_start(make_engine):
    with pytest.raises(ConfigError, match="max_seq_len: 128 exceeds the 64"):
        make_engine(EngineConfig(max_seq_len=128), max_seq_len=64)


# Abort


@pytest.mark.parametrize("steps", range(6), ids=lambda steps: f"after {steps} steps")
def test_abort_works_in_every_state_and_twice(make_engine, steps):
    """0: queued, 1-2: between chunks, 3-5: decoding."""
    engine = make_engine(num_blocks=16)
    other = submit(engine, [2], greedy(12))
    inbox = submit(engine, [1] * 20, greedy(10))
    for _ in range(steps):
        engine.step()
    delivered = len(inbox.token_ids)
    engine.abort(inbox.request_id)
    engine.abort(inbox.request_id)
    engine.step()
    assert inbox.reason == "abort"
    assert len(inbox.token_ids) == delivered
    engine.scheduler.check_integrity()
    assert engine.stats().running == 1
    engine.abort(inbox.request_id)
    run(engine)
    assert other.reason == "length"
    assert engine.stats().finished["abort"] == 1


def test_abort_of_a_preempted_request(make_engine):
    engine = make_engine(num_blocks=8)
    submit(engine, [1] * 8, greedy(20))
    young = submit(engine, [2] * 8, greedy(20))
    while not engine.stats().preemptions:
        engine.step()
    engine.abort(young.request_id)
    engine.step()
    assert young.reason == "abort"
    run(engine)


def test_abort_of_finished_and_unknown_requests_does_nothing(make_engine):
    engine = make_engine()
    inbox = submit(engine, [1], greedy(1))
    run(engine)
    engine.abort(inbox.request_id)
    engine.abort("nobody")
    run(engine)
    assert inbox.reason == "length"
    assert engine.stats().finished["abort"] == 0


def test_an_abort_that_comes_too_late_does_not_hit_the_next_owner_of_the_id(make_engine):
    engine = make_engine()
    first = submit(engine, [1], greedy(1), request_id="a")
    engine.executor.before_step = lambda plan: engine.abort("a")
    engine.step()
    engine.executor.before_step = None
    second = submit(engine, [1], greedy(1), request_id="a")
    run(engine)
    assert (first.reason, second.reason) == ("length", "length")


def test_200_random_aborts_among_500_requests_leak_nothing(make_engine, scripted):
    engine = make_engine(EngineConfig(max_queued_requests=1000), num_blocks=12, max_seqs=6)
    rng = random.Random(1)
    prompts = [[rng.randrange(2)] * rng.randint(1, 30) for _ in range(500)]
    inboxes = [submit(engine, prompt, greedy(rng.randint(1, 12))) for prompt in prompts]
    victims = set(rng.sample(range(500), 200))
    for victim in sorted(victims):
        for _ in range(rng.randrange(4)):
            engine.step()
        engine.abort(inboxes[victim].request_id)
        if victim % 10 == 0:
            engine.scheduler.check_integrity()
    run(engine)
    for i, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        assert inbox.token_ids == scripted.greedy(prompt, len(inbox.token_ids))
        assert inbox.reason == "length" or (i in victims and inbox.reason == "abort")
    assert sum(engine.stats().finished.values()) == 500


# Failures


def test_a_failing_step_loses_its_requests_only_and_publishes_nothing(make_engine, scripted):
    engine = make_engine(max_seqs=2)
    lost = [submit(engine, [i] * 8, greedy(4)) for i in range(2)]
    waiting = submit(engine, [0] * 8, greedy(4))
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
    again = submit(engine, [1] * 8, greedy(4))
    run(engine)
    assert waiting.token_ids == scripted.greedy([0] * 8, 4)
    assert waiting.outputs[-1].usage.cached_tokens == 4  # from before the failure
    assert again.token_ids == scripted.greedy([1] * 8, 4)
    assert again.outputs[-1].usage.cached_tokens == 0
    assert (engine.stats().failed_steps, engine.stats().finished["error"]) == (1, 2)


def test_unusable_logits_fail_their_request_alone(make_engine, scripted):
    engine = make_engine(max_step_tokens=32)
    execute = engine.executor.execute

    def with_nan(plan):
        result = execute(plan)
        result.logits[1, 3] = np.nan
        return result

    inboxes = [submit(engine, [i], greedy(3)) for i in range(3)]
    engine.executor.execute = with_nan
    engine.step()
    engine.executor.execute = execute
    run(engine)
    assert [inbox.reason for inbox in inboxes] == ["length", "error", "length"]
    assert "NaN" in str(inboxes[1].outputs[-1].error)
    assert inboxes[2].token_ids == scripted.greedy([2], 3)


def test_a_failing_callback_ends_its_request_only(make_engine, scripted):
    engine = make_engine()
    seen = []

    def failing(output):
        seen.append(output)
        raise ValueError("no")

    engine.submit([1], greedy(5), on_output=failing)
    other = submit(engine, [2], greedy(5))
    run(engine)
    assert [output.finish_reason for output in seen] == [None, "error"]
    assert other.token_ids == scripted.greedy([2], 5)


def test_a_broken_loop_fails_everything_and_says_so(make_engine):
    engine = make_engine()
    engine.start()
    started = threading.Event()
    engine.scheduler.schedule = lambda: (started.wait(5), 1 / 0)
    arrived = [threading.Event() for _ in range(2)]
    outputs = []
    for event in arrived:
        engine.submit([1], greedy(5), on_output=lambda output, event=event: (outputs.append(output), event.set()))
    started.set()
    assert all(event.wait(5) for event in arrived)
    engine._thread.join(5)
    assert {output.finish_reason for output in outputs} == {"error"}
    assert not engine.is_healthy(1000)
    with pytest.raises(EngineError, match="broken"):
        submit(engine, [1], greedy(5))


# Prefix cache


def test_salts_and_no_salt_share_nothing(make_engine):
    engine = make_engine()
    for salt in ("", "x", "y"):
        inbox = submit(engine, [1] * 9, greedy(1), cache_salt=salt)
        run(engine)
        assert inbox.outputs[-1].usage.cached_tokens == 0
    again = submit(engine, [1] * 9, greedy(1), cache_salt="x")
    run(engine)
    assert again.outputs[-1].usage.cached_tokens == 8


def test_with_a_hash_that_always_collides_answers_stay_right(make_engine, scripted):
    engine = make_engine(block_hash=lambda *_: 7, num_blocks=16)
    rng = random.Random(3)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(4, 20))] for _ in range(60)]
    inboxes = [submit(engine, prompt, greedy(4)) for prompt in prompts]
    run(engine)
    for prompt, inbox in zip(prompts, inboxes, strict=True):
        assert inbox.token_ids == scripted.greedy(prompt, 4)


def test_aborts_and_failures_between_schedule_and_commit_leave_no_visible_block(make_engine, scripted):
    """Fresh blocks are poisoned: a block published before it was written would be read and give another answer."""
    for seed in range(60):
        engine = make_engine(num_blocks=12, max_seqs=4)
        rng = random.Random(seed)
        inboxes = [submit(engine, [0] * rng.randint(4, 20), greedy(4)) for _ in range(6)]

        def strike(plan, rng=rng, engine=engine, inboxes=inboxes):
            engine.abort(rng.choice(inboxes).request_id)
            if rng.random() < 0.3:
                raise RuntimeError("struck")

        engine.executor.before_step = strike
        for _ in range(rng.randint(1, 6)):
            engine.step()
        engine.executor.before_step = None
        late = submit(engine, [0] * 20, greedy(4))
        run(engine)
        for inbox in (*inboxes, late):
            assert inbox.token_ids == scripted.greedy([0] * inbox.outputs[-1].usage.prompt_tokens, len(inbox.token_ids))
        assert late.reason == "length"


def test_reset_prefix_cache_forgets(make_engine):
    engine = make_engine()
    submit(engine, [1] * 9, greedy(1))
    run(engine)
    assert engine.stats().blocks_cached == 2
    engine.reset_prefix_cache()
    assert engine.stats().blocks_cached == 0
    again = submit(engine, [1] * 9, greedy(1))
    run(engine)
    assert again.outputs[-1].usage.cached_tokens == 0
    engine.start()
    engine.reset_prefix_cache()
    assert engine.stats().blocks_cached == 0


# Scoring


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_scores_equal_one_shot_logits_however_chunked(make_engine, scripted, budget):
    engine = make_engine(max_step_tokens=budget)
    tokens = [(5 * i) % 64 for i in range(64)]
    assert (engine.score(tokens) == scripted.logits(tokens, 64)).all()


def test_scores_among_other_requests_in_a_preempting_pool(make_engine, scripted):
    engine = make_engine(num_blocks=17, max_seqs=4)
    prompts = [[i] * 20 for i in range(8)]
    texts = [[(seed + 3 * i) % 64 for i in range(40)] for seed in range(4)]
    scores: dict[int, np.ndarray] = {}
    threads = [
        threading.Thread(target=lambda i=i, text=text: scores.update({i: engine.score(text)}))
        for i, text in enumerate(texts)
    ]
    for thread in threads:
        thread.start()
    generations = engine.generate(prompts, greedy(30))
    for thread in threads:
        thread.join(10)
    for i, text in enumerate(texts):
        assert (scores[i] == scripted.logits(text, 64)).all()
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == scripted.greedy(prompt, 30)
    engine.close()
    assert_idle(engine)


def test_streamed_scores_come_in_order_each_position_once(make_engine, scripted):
    engine = make_engine(max_step_tokens=7)
    pieces = []
    engine.score_stream(list(range(40)), lambda start, logits: pieces.append((start, logits.copy())))
    assert [start for start, _ in pieces] == [0, 7, 14, 21, 28, 35]
    assert (np.concatenate([rows for _, rows in pieces]) == scripted.logits(range(40), 64)).all()


def test_scoring_neither_asks_nor_tells_the_prefix_cache(make_engine):
    engine = make_engine()
    engine.generate([[1] * 9], greedy(1))
    before = engine.stats()
    engine.score([1] * 20)
    after = engine.stats()
    assert after.prefix_queried_tokens == before.prefix_queried_tokens
    assert after.blocks_cached == before.blocks_cached


def test_a_failure_while_scoring_reaches_the_caller(make_engine):
    engine = make_engine()

    def failing(start, logits):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.score_stream([1, 2, 3], failing)
    engine.executor.before_step = lambda plan: 1 / 0
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        engine.score([1, 2, 3])


# Conveniences


def test_generate_takes_more_prompts_than_the_queue(make_engine, scripted):
    engine = make_engine(EngineConfig(max_seqs=2, max_queued_requests=3))
    prompts = [[i % 64] for i in range(40)]
    generations = engine.generate(prompts, [greedy(1 + i % 3) for i in range(40)])
    for i, generation in enumerate(generations):
        assert list(generation.token_ids) == scripted.greedy(prompts[i], 1 + i % 3)
        assert generation.usage.output_tokens == 1 + i % 3
        assert generation.finish_reason == "length"


def test_generate_encodes_text_and_joins_increments(make_engine, byte_tokenizer):
    engine = scripted_text(make_engine, byte_tokenizer, "_hello")
    (generation,) = engine.generate(["ab"], greedy(5, logprobs=0))
    assert (generation.text, len(generation.logprobs)) == ("hello", 5)
    assert generation.usage.prompt_tokens == 2


def test_generate_refuses_the_whole_lot_for_one_bad_prompt(make_engine):
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.generate([[1], [99]], GREEDY)
    engine.close()
    assert_idle(engine)


def test_stream_yields_every_token_and_aborts_when_left(make_engine, scripted):
    engine = make_engine()
    outputs = list(engine.stream([1], greedy(5)))
    assert [token for output in outputs for token in output.token_ids] == scripted.greedy([1], 5)
    stream = engine.stream([1], greedy(50))
    next(stream)
    stream.close()
    engine.close(drain=True)
    assert engine.stats().finished["abort"] == 1
    assert_idle(engine)


def test_warm_up_runs_the_largest_shapes_and_leaves_no_trace(make_engine):
    engine = make_engine(max_step_tokens=32, max_seqs=8)
    before = engine.stats()
    engine.warm_up()
    assert engine.executor.shapes == [(32, 1, 1), (8, 8, 8)]
    assert engine.stats() == before
    submit(engine, [1] * 9, greedy(1))
    run(engine)
    cached = engine.stats().blocks_cached
    engine.start()
    engine.warm_up()
    assert engine.stats().blocks_cached == cached
    again = engine.generate([[1] * 9], greedy(1))
    assert again[0].usage.cached_tokens == 8


# The thread


def test_close_with_drain_finishes_what_was_accepted(make_engine):
    engine = make_engine()
    engine.start()
    inboxes = [submit(engine, [i], greedy(20)) for i in range(20)]
    engine.close(drain=True)
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert engine.executor.closed
    assert_idle(engine)


def test_close_without_drain_aborts_and_nothing_is_accepted_afterwards(make_engine):
    engine = make_engine()
    inboxes = [submit(engine, [i], greedy(20)) for i in range(20)]
    engine.close()
    engine.close()
    assert {inbox.reason for inbox in inboxes} == {"abort"}
    for refused in (lambda: submit(engine, [1], greedy(1)), engine.start, lambda: engine.score([1])):
        with pytest.raises(EngineError, match="closed"):
            refused()
    assert not engine.is_healthy(1000)


def test_a_drain_that_takes_too_long_aborts_the_rest(make_engine):
    engine = make_engine()
    engine.executor.before_step = lambda plan: time.sleep(0.01)
    engine.start()
    inbox = submit(engine, [1], greedy(60))
    engine.close(drain=True, timeout_s=0.05)
    assert inbox.reason == "abort"
    assert_idle(engine)


def test_an_idle_engine_sleeps(make_engine):
    engine = make_engine()
    turns = []
    step = engine._loop.step
    engine._loop.step = lambda: (turns.append(1), step())
    engine.generate([[1]], greedy(3))
    time.sleep(0.02)
    count = len(turns)
    time.sleep(0.1)
    assert len(turns) == count


def test_health_is_forward_progress(make_engine):
    engine = make_engine()
    blocked, release = threading.Event(), threading.Event()

    def block(plan):
        blocked.set()
        release.wait(10)

    with engine:
        time.sleep(0.06)
        assert engine.is_healthy(0.05)  # idle, however long
        engine.executor.before_step = block
        inbox = submit(engine, [1], greedy(2))
        assert engine.is_healthy(5)
        assert blocked.wait(5)
        time.sleep(0.06)
        assert not engine.is_healthy(0.05)
        release.set()
        deadline = time.monotonic() + 5
        while inbox.reason is None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert engine.is_healthy(0.05)


def test_submissions_and_aborts_from_many_threads(make_engine, scripted):
    engine = make_engine(EngineConfig(max_queued_requests=1000), num_blocks=16)
    inboxes, lock = [], threading.Lock()

    def client(seed):
        rng = random.Random(seed)
        for _ in range(30):
            inbox = submit(engine, [rng.randrange(3)] * rng.randint(1, 12), greedy(rng.randint(1, 6)))
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
    assert_idle(engine)


def test_a_callback_may_submit_and_abort(make_engine):
    engine = make_engine()
    second = Inbox()

    def chain(output):
        if output.finish_reason is not None:
            engine.submit([2], greedy(2), on_output=second)

    engine.submit([1], greedy(1), on_output=chain)
    run(engine)
    assert second.reason == "length"


def test_counters_tell_where_time_went(make_engine):
    engine = make_engine()
    engine.executor.before_step = lambda plan: time.sleep(0.002)
    submit(engine, [1] * 9, greedy(4))
    run(engine)
    stats = engine.stats()
    assert (stats.steps, stats.prompt_tokens, stats.output_tokens) == (5, 9, 4)
    assert stats.execute_s >= 5 * 0.002
    assert 0 < stats.overhead_share < 1
    assert stats.last_step_s >= 0.002
    assert stats.finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_every_step_stays_inside_the_plans_limits(make_engine):
    """300 arrivals at max_seq_len 64, max_seqs 3, max_step_tokens 16: the executor checks each step."""
    engine = make_engine(max_seq_len=64, max_seqs=3, max_step_tokens=16)
    rng = random.Random(5)
    inboxes = []
    for _ in range(300):
        length = rng.randint(1, 63)
        inboxes.append(submit(engine, [rng.randrange(64)] * length, greedy(rng.randint(1, min(6, 64 - length)))))
        for _ in range(rng.randrange(12)):
            engine.step()
    run(engine)
    assert {inbox.reason for inbox in inboxes} == {"length"}
    assert max(tokens for tokens, _, _ in engine.executor.shapes) == 16
    assert max(seqs for _, seqs, _ in engine.executor.shapes) == 3
