"""With guesses every request gets what it gets without: the same tokens, text, reasons, logprobs, whatever is guessed.

The scripted executor reads its history through the block table and, in trees, through the mask: K/V that is stale,
missing, of a rejected token or moved to the wrong place changes the answer or trips one of its assertions.
"""

import numpy as np
import pytest

from optimc.errors import EngineError
from optimc_runtime.config import EngineConfig
from optimc_runtime.request import SamplingParams

WIDE = {"max_seq_len": 256, "max_step_tokens": 256, "num_blocks": 600}


@pytest.fixture
def answers(make_engine, drive):
    """Answer prompts on a new engine and return the inboxes; integrity is checked after every step."""

    def run(prompts, params, *, config=None, speculator=None, **options):
        engine = make_engine(config, speculator=speculator, **options)
        each = params if isinstance(params, list) else [params] * len(prompts)
        inboxes = [
            drive.submit(engine, prompt, mine, request_id=f"r{index}")
            for index, (prompt, mine) in enumerate(zip(prompts, each, strict=True))
        ]
        steps = 0
        while engine.step():
            engine.scheduler.check_integrity()
            steps += 1
            assert steps < 20_000
        drive.assert_idle(engine)
        run.engine = engine
        return inboxes

    return run


@pytest.fixture
def compare(answers, speculation):
    """Answer prompts plainly, then with guesses of each source, and compare everything but times and cuts."""

    def run(prompts, params, sources, shapes, *, config=None, vocab_size=64, **options):
        plain = answers(prompts, params, config=config, vocab_size=vocab_size, **options)
        truth = {f"r{index}": inbox.token_ids for index, inbox in enumerate(plain)}
        for source in sources:
            for shape in shapes:
                speculator = speculation.make(source, shape, truth, vocab_size)
                guessed = answers(
                    prompts, params, config=config, speculator=speculator, vocab_size=vocab_size, **options
                )
                for one, other in zip(plain, guessed, strict=True):
                    assert_same(one, other, f"{source}, {shape}")
                yield source, shape, speculator, run.answers.engine

    run.answers = answers
    return run


def assert_same(one, other, what=""):
    """Two inboxes hold the same answer, cut differently."""
    assert other.token_ids == one.token_ids, what
    assert other.text == one.text, what
    assert other.reason == one.reason, what
    assert other.outputs[-1].usage == one.outputs[-1].usage, what
    probs = [joined_logprobs(inbox) for inbox in (one, other)]
    assert (probs[0] is None) == (probs[1] is None)
    if probs[0] is not None:
        assert len(probs[0]) == len(probs[1]) == len(one.token_ids)
        for left, right in zip(*probs, strict=True):
            assert left.token_id == right.token_id
            assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
            assert [token for token, _ in left.top] == [token for token, _ in right.top]


def joined_logprobs(inbox):
    if inbox.outputs[0].logprobs is None:
        return None
    return [logprob for output in inbox.outputs for logprob in output.logprobs]


def prompts_of(count, longest=9):
    return [[(7 * index + place) % 60 for place in range(1 + (5 * index) % longest)] for index in range(count)]


SHAPE_NAMES = ("chain of 1", "chain of 4", "2x2", "26 nodes")


@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_text_is_the_same_whatever_is_guessed(compare, drive, batch):
    steps = {}
    runs = compare(prompts_of(batch), drive.greedy(60), ("random", "oracle", "wrong", "mixed"), SHAPE_NAMES, **WIDE)
    for source, shape, speculator, engine in runs:
        steps[source, shape] = engine.stats().steps
        if source == "oracle":
            depth = speculator.source.shape.depth
            full = [each for each in speculator.verified if len(each.path) == depth]
            assert len(full) > 5, "nothing was accepted"
            assert all(each.num_emitted == depth + 1 for each in full)
            assert shape.startswith("chain") == (engine.executor.num_moves == 0)
        if source == "wrong":
            assert not any(each.path for each in speculator.verified)
            assert engine.executor.num_moves == 0
    assert steps["oracle", "chain of 4"] < steps["wrong", "chain of 4"] / 3


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_long_texts_are_the_same_whatever_is_guessed(compare, batch, temperature):
    params = SamplingParams(max_tokens=200, temperature=temperature, top_p=0.95, seed=5)
    for _ in compare(prompts_of(batch), params, ("random", "oracle", "wrong", "mixed"), SHAPE_NAMES, **WIDE):
        pass


def test_sampled_text_is_the_same(compare):
    params = [
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=seed, top_k=20 * (seed % 2)) for seed in range(5)
    ]
    for source, _, speculator, _ in compare(prompts_of(5), params, ("mixed", "oracle"), ("chain of 4", "2x2"), **WIDE):
        if source == "oracle":
            assert any(each.path for each in speculator.verified)


EDITS = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 4.0, 9: -100.0}},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": tuple(range(0, 64, 2))},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("edit", EDITS)
def test_penalties_bias_min_tokens_and_logprobs_see_what_was_accepted(compare, edit, temperature):
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=3, **{"logprobs": 1, **EDITS[edit]})
    for source, _, speculator, _ in compare([[5, 6, 7], [1]], params, ("mixed",), ("chain of 4", "2x2"), **WIDE):
        assert any(each.path for each in speculator.verified), source


def test_a_loop_that_a_frequency_penalty_ends_is_left_at_the_same_place(make_engine, drive, speculation):
    """The script wants one token forever: a penalty that counted too little or too much would show."""
    texts = []
    for guesses in (False, True):
        truth = {"r0": texts[0] if texts else []}
        engine = make_engine(
            speculator=speculation.make("oracle", "chain of 4", truth, 64) if guesses else None, **WIDE
        )
        execute = engine.executor.execute

        def looping(plan, execute=execute):
            result = execute(plan)
            result.logits[:, 7] = 8.0
            return result

        engine.executor.execute = looping
        params = drive.greedy(40, frequency_penalty=0.5)
        inbox = drive.submit(engine, [1, 2], params, request_id="r0")
        drive.run(engine)
        texts.append(inbox.token_ids)
    assert texts[0] == texts[1]
    assert 1 < texts[0].count(7) < 30


@pytest.mark.parametrize("shape", ["chain of 4", "2x2"])
def test_any_accept_length_at_any_offset_in_a_block(make_engine, drive, speculation, scripted, shape):
    depth = max(speculation.shape(speculation.shapes[shape]).depths)
    for offset in range(4):
        for right in range(int(depth) + 1):
            prompt = list(range(1, 2 + offset))
            expected = scripted.greedy(prompt, 20)
            source = speculation.Guesser({"r0": expected}, speculation.shapes[shape], 64, lambda _, right=right: right)
            speculator = speculation.Speculator(source)
            engine = make_engine(speculator=speculator, **WIDE)
            inbox = drive.submit(engine, prompt, drive.greedy(20), request_id="r0")
            drive.run(engine)
            assert inbox.token_ids == expected
            assert [len(each.path) for each in speculator.verified[:3]] == [right] * 3


@pytest.mark.parametrize("shape", ["chain of 4", "2x2", "26 nodes"])
@pytest.mark.parametrize("max_seq_len", [29, 30, 31, 32])
def test_the_last_tokens_before_a_limit(compare, drive, max_seq_len, shape):
    """Trees are cut so that neither their depth nor their slots pass the limits."""
    limits = {"max_seq_len": max_seq_len, "max_step_tokens": 64, "num_blocks": 32}
    for max_tokens in (max_seq_len - 3, max_seq_len - 4, 2, 1):
        for _ in compare([[1, 2, 3]], drive.greedy(max_tokens), ("oracle", "mixed"), (shape,), **limits):
            pass


@pytest.mark.parametrize("last_prompt", [26, 27, 28, 29])
def test_prompts_in_chunks_beside_guesses(compare, drive, last_prompt):
    """A budget of 8, of which the last chunk of the last prompt leaves a little: chains only, in what is left."""
    prompts = [[1, 2], list(range(40)), [3], list(range(20, 20 + last_prompt))]
    runs = compare(
        prompts,
        drive.greedy(30),
        ("oracle", "mixed"),
        ("chain of 4", "2x2"),
        max_seq_len=128,
        max_step_tokens=8,
        num_blocks=200,
    )
    beside_chunks = 0
    for _, _, speculator, engine in runs:
        beside_chunks += sum(chains_only for *_, chains_only in speculator.calls)
        assert max(tokens for tokens, _, _ in engine.executor.shapes) <= 8
        rows = [num_rows for _, num_rows in speculator.tree_steps]
        assert rows
        assert max(rows) <= 8
    assert (beside_chunks > 0) == (last_prompt > 26)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_before_and_after_guesses(compare, drive, prefix_cache):
    prompts = [list(range(index, index + 9)) for index in range(5)]
    config = EngineConfig(prefix_cache=prefix_cache)
    runs = compare(
        prompts, drive.greedy(30), ("oracle", "mixed", "wrong"), ("chain of 4", "2x2"), config=config,
        max_seq_len=64, max_step_tokens=64, num_blocks=24,
    )  # fmt: skip
    preempted = 0
    for _, _, speculator, engine in runs:
        assert speculator.verified
        preempted += engine.stats().preemptions
    assert preempted


def test_nobody_is_preempted_for_a_guess(answers, drive, speculation):
    """All guesses are wrong: steps, preemptions and the work done are those of the plain run."""
    prompts = [list(range(index, index + 9)) for index in range(6)]
    options = {"max_seq_len": 64, "max_step_tokens": 64, "num_blocks": 24}
    config = EngineConfig(prefix_cache=False)
    plain = answers(prompts, drive.greedy(30), config=config, **options)
    expected = answers.engine.stats()
    assert expected.preemptions
    truth = {f"r{index}": inbox.token_ids for index, inbox in enumerate(plain)}
    for shape in ("chain of 4", "26 nodes"):
        speculator = speculation.make("wrong", shape, truth, 64)
        guessed = answers(prompts, drive.greedy(30), config=config, speculator=speculator, **options)
        for one, other in zip(plain, guessed, strict=True):
            assert_same(one, other)
        stats = answers.engine.stats()
        assert (stats.preemptions, stats.steps) == (expected.preemptions, expected.steps)
        assert speculator.verified


def test_a_guess_shrinks_to_the_blocks_that_are_free(make_engine, drive, speculation, scripted):
    """Four blocks hold the 13 known tokens and 3 guesses; a fifth is taken only if it is free and nobody waits."""
    prompt = list(range(12))
    expected = scripted.greedy(prompt, 20)
    nodes = {}
    for num_blocks, waits in ((8, False), (4, False), (8, True)):
        source = speculation.Guesser({"r0": expected}, (-1, 0, 1, 2, 3, 4), 64, lambda _: 0)
        speculator = speculation.Speculator(source)
        engine = make_engine(
            EngineConfig(max_seqs=1, prefix_cache=False), speculator=speculator, max_seq_len=64, max_step_tokens=32,
            num_blocks=num_blocks,
        )  # fmt: skip
        drive.submit(engine, prompt, drive.greedy(min(20, num_blocks * 4 - 12)), request_id="r0")
        engine.step()
        if waits:
            drive.submit(engine, [1], drive.greedy(1))
        engine.step()
        engine.scheduler.check_integrity()
        nodes[num_blocks, waits] = speculator.verified[0].tree.shape.num_nodes if speculator.verified else 0
        sequence = speculator.verified[0].sequence
        assert len(sequence.blocks) == -(-sequence.num_tokens // 4), "blocks were not given back"
        engine.executor.before_step = None
        drive.run(engine)
    assert nodes == {(8, False): 6, (4, False): 2, (8, True): 3}


def test_accepted_tokens_are_found_in_the_prefix_cache_and_rejected_ones_never(
    make_engine, drive, speculation, scripted
):
    prompt = [1, 2, 3]
    expected = scripted.greedy(prompt, 40)
    speculator = speculation.make("mixed", "2x2", {"r0": expected}, 64)
    engine = make_engine(speculator=speculator, **WIDE)
    drive.submit(engine, prompt, drive.greedy(40), request_id="r0")
    drive.run(engine)
    text = prompt + expected
    cache = engine.scheduler.cache
    for node in cache._by_block.values():
        blocks = []
        while node.parent is not None:
            blocks.insert(0, np.frombuffer(node.tokens, np.int64).tolist())
            node = node.parent
        content = [token for block in blocks for token in block]
        assert content == text[: len(content)], "a rejected token was published"
    assert len(cache) == (len(text) - 1) // 4
    again = drive.submit(engine, text[:-1], drive.greedy(1))
    drive.run(engine)
    assert again.outputs[-1].usage.cached_tokens == (len(text) - 2) // 4 * 4
    assert again.token_ids == text[-1:]


def test_stop_strings_stop_ids_and_limits_inside_a_path(compare, drive, byte_tokenizer):
    """The answer is "the quick brown fox" and so on, byte by byte; stops fall inside what one step accepts."""
    text = "the quick brown fox jumps"
    cases = [
        drive.greedy(40, stop=("ck br",)),
        drive.greedy(40, stop=("zz", "uick")),
        drive.greedy(40, stop=("q",), min_tokens=8),
        drive.greedy(40, stop_token_ids=(ord("q"),)),
        drive.greedy(40, stop_token_ids=(ord("b"),), ignore_eos=True),
        drive.greedy(9),
        drive.greedy(10),
        drive.greedy(24, ignore_eos=True),
        drive.greedy(40),
    ]
    for params in cases:
        for _, _, speculator, _ in compare(
            [[1]], params, ("oracle", "mixed"), ("chain of 4", "2x2"), vocab_size=257, tokenizer=byte_tokenizer,
            script=dict(enumerate([*text.encode(), 256])), eos=(256,), max_seq_len=120, max_step_tokens=32,
        ):  # fmt: skip
            assert any(each.path for each in speculator.verified)


def test_one_output_per_step_carries_all_its_tokens(make_engine, drive, speculation, scripted):
    expected = scripted.greedy([1, 2], 11)
    engine = make_engine(speculator=speculation.make("oracle", "chain of 4", {"r0": expected}, 64), **WIDE)
    inbox = drive.submit(engine, [1, 2], drive.greedy(11, logprobs=0), request_id="r0")
    drive.run(engine)
    assert [len(output.token_ids) for output in inbox.outputs] == [1, 5, 5]
    assert [len(output.logprobs) for output in inbox.outputs] == [1, 5, 5]
    assert [output.usage.output_tokens for output in inbox.outputs] == [1, 6, 11]
    assert engine.stats().output_tokens == 11
    assert engine.stats().steps == 3


def test_tokens_after_a_stop_count_nowhere(make_engine, drive, speculation, scripted):
    """A stop id in the middle of an accepted path: sequence, usage and counters end with it."""
    expected = scripted.greedy([1, 2], 12)
    engine = make_engine(speculator=speculation.make("oracle", "chain of 4", {"r0": expected}, 64), **WIDE)
    stop = expected[3]
    assert stop not in expected[:3]
    inbox = drive.submit(engine, [1, 2], drive.greedy(12, stop_token_ids=(stop,)), request_id="r0")
    drive.run(engine)
    assert inbox.token_ids == expected[:4]
    assert inbox.reason == "stop"
    assert engine.stats().output_tokens == 4
    (verified,) = engine._loop._speculator.verified
    assert verified.num_emitted == 3
    assert engine._loop._speculator.forgotten == [verified.sequence]


def test_an_abort_between_steps_with_guesses(make_engine, drive, speculation, scripted):
    expected = scripted.greedy([1, 2], 60)
    engine = make_engine(speculator=speculation.make("oracle", "2x2", {"r0": expected, "r1": expected}, 64), **WIDE)
    first = drive.submit(engine, [1, 2], drive.greedy(60), request_id="r0")
    other = drive.submit(engine, [1, 2], drive.greedy(60), request_id="r1")
    for _ in range(5):
        engine.step()
    engine.abort("r0")
    drive.run(engine)
    assert first.reason == "abort"
    assert first.token_ids == expected[: len(first.token_ids)]
    assert 8 < len(first.token_ids) < 60
    assert other.token_ids == expected


def test_logits_that_are_nan_in_a_tree_end_their_request_alone(make_engine, drive, speculation, scripted):
    prompts = [[1, 2], [3, 4], [5]]
    truth = {f"r{index}": scripted.greedy(prompt, 20) for index, prompt in enumerate(prompts)}
    engine = make_engine(speculator=speculation.make("oracle", "2x2", truth, 64), **WIDE)
    inboxes = [
        drive.submit(engine, prompt, drive.greedy(20), request_id=f"r{index}") for index, prompt in enumerate(prompts)
    ]
    engine.step()
    execute = engine.executor.execute

    def broken(plan):
        result = execute(plan)
        first, end = plan.query_start[1:3]
        result.logits[first + 1 : end, 5] = np.nan  # every node, but not the root
        return result

    engine.executor.execute = broken
    engine.step()
    engine.executor.execute = execute
    drive.run(engine)
    assert inboxes[1].reason == "error"
    assert "NaN" in str(inboxes[1].outputs[-1].error)
    assert "output position 2" in str(inboxes[1].outputs[-1].error)
    assert inboxes[1].token_ids == truth["r1"][:1], "nothing of the broken step is delivered"
    assert [inboxes[index].token_ids for index in (0, 2)] == [truth["r0"], truth["r2"]]


@pytest.mark.parametrize("what", ["execute", "move"])
def test_an_executor_that_raises_fails_the_step_and_publishes_nothing(make_engine, drive, speculation, scripted, what):
    truth = {name: scripted.greedy([1, 2], 30) for name in ("r0", "r1")}
    engine = make_engine(speculator=speculation.make("oracle", "2x2", truth, 64), **WIDE)
    failed = drive.submit(engine, [1, 2], drive.greedy(30), request_id="r0")
    engine.step()
    cached = len(engine.scheduler.cache)
    works = getattr(engine.executor, what)

    def raising(*_):
        raise EngineError("out of order")

    setattr(engine.executor, what, raising)
    while failed.reason is None:  # paths that need no move do not call it
        cached = len(engine.scheduler.cache)
        engine.step()
        engine.scheduler.check_integrity()
    setattr(engine.executor, what, works)
    assert failed.reason == "error"
    assert "out of order" in str(failed.outputs[-1].error)
    assert len(engine.scheduler.cache) == cached
    assert engine.stats().failed_steps == 1
    again = drive.submit(engine, [1, 2], drive.greedy(30), request_id="r1")
    drive.run(engine)
    assert again.token_ids == truth["r1"]


def test_a_callback_that_raises_ends_its_request_alone(make_engine, drive, speculation, scripted):
    truth = {f"r{index}": scripted.greedy([1, 2], 30) for index in range(2)}
    engine = make_engine(speculator=speculation.make("oracle", "2x2", truth, 64), **WIDE)
    received = []

    def raising(output):
        received.append(output)
        if len(received) == 3:
            raise ValueError("enough")

    engine.submit([1, 2], drive.greedy(30), on_output=raising, request_id="r0")
    other = drive.submit(engine, [1, 2], drive.greedy(30), request_id="r1")
    drive.run(engine)
    assert received[-1].finish_reason == "error"
    assert "enough" in str(received[-1].error)
    assert other.token_ids == truth["r1"]


def test_a_text_that_fails_inside_a_path_ends_its_request_alone(make_engine, drive, speculation, scripted):
    truth = {f"r{index}": scripted.greedy([1, 2], 30) for index in range(2)}
    engine = make_engine(speculator=speculation.make("oracle", "2x2", truth, 64), **WIDE)
    inboxes = [drive.submit(engine, [1, 2], drive.greedy(30), request_id=name) for name in truth]
    engine.step()
    text = engine._loop._delivery.active["r0"].text
    pushed = []

    class Broken:
        stopped = False

        def push(self, token_id):
            pushed.append(token_id)
            if len(pushed) == 2:
                raise ValueError("no such piece")
            return text.push(token_id)

        def finish(self):
            return text.finish()

    engine._loop._delivery.active["r0"].text = Broken()
    drive.run(engine)
    assert inboxes[0].reason == "error"
    assert inboxes[0].token_ids == truth["r0"][:1]
    assert inboxes[1].token_ids == truth["r1"]


def test_scoring_goes_on_beside_guesses(make_engine, drive, speculation, scripted):
    truth = {"r0": scripted.greedy([1, 2], 60)}
    engine = make_engine(speculator=speculation.make("oracle", "2x2", truth, 64), max_seq_len=128, num_blocks=64)
    inbox = drive.submit(engine, [1, 2], drive.greedy(60), request_id="r0")
    for _ in range(3):
        engine.step()
    text = list(range(1, 33))
    logits = np.empty((len(text), 64), np.float32)
    with engine:
        seen = []

        def keep(start, rows):
            seen.extend(range(start, start + len(rows)))
            logits[start : start + len(rows)] = rows

        engine.score_stream(text, keep)
        engine.close(drain=True)
    assert seen == list(range(len(text)))
    np.testing.assert_array_equal(logits, scripted.logits(text, 64))
    assert inbox.token_ids == truth["r0"]


def test_who_is_offered_a_guess(make_engine, drive, speculation, scripted):
    """Not a prompt, not one that wants a single token more, not one that asked for none."""
    engine = make_engine(speculator=speculation.make("wrong", "chain of 1", {}, 64), **WIDE)
    speculator = engine._loop._speculator
    offered = []
    source = speculator.source

    def spying(sequence):
        offered.append((sequence.request_id, sequence.num_output, sequence.max_tokens - sequence.num_tokens))
        return source(sequence)

    speculator.source = spying
    inbox = drive.submit(engine, [1], drive.greedy(4), request_id="asked")
    refused = drive.submit(engine, [2, 3], drive.greedy(4), request_id="refused")
    engine.step()
    engine._loop._delivery.active["refused"].sequence.proposer = "off"
    drive.run(engine)
    assert {name for name, *_ in offered} == {"asked"}
    assert all(num_output > 0 and left > 1 for _, num_output, left in offered)
    assert inbox.token_ids == scripted.greedy([1], 4)
    assert refused.token_ids == scripted.greedy([2, 3], 4)
    assert set(speculator.calls) == {(1, 1, 254, False)}


def test_guesses_are_never_verified_where_there_are_none(make_engine, drive, speculation, scripted):
    speculator = speculation.Speculator(lambda _: None)
    engine = make_engine(speculator=speculator, **WIDE)
    inbox = drive.submit(engine, [1, 2], drive.greedy(10))
    drive.run(engine)
    assert inbox.token_ids == scripted.greedy([1, 2], 10)
    assert not speculator.tree_steps
    assert len(speculator.plain_steps) == 10


def test_an_idle_speculator_costs_nothing(make_engine, drive, speculation):
    """Work and batch stay the very same objects from step to step, and nobody is asked."""
    speculator = speculation.make("wrong", "chain of 4", {}, 64)
    speculator.is_idle = True
    engine = make_engine(speculator=speculator, **WIDE)
    drive.submit(engine, [1, 2], drive.greedy(20))
    drive.submit(engine, [3], drive.greedy(20))
    for _ in range(3):
        engine.step()
    batch = engine._loop._batch
    for _ in range(5):
        engine.step()
        assert engine._loop._batch is batch
    assert not speculator.calls
    assert speculator.plain_steps[1:] == [(2, 2)] * 7
    drive.run(engine)


@pytest.mark.parametrize("shape", ["chain of 4", "2x2"])
def test_hidden_states_are_of_the_rows_the_newest_tokens_came_from(make_engine, drive, speculation, scripted, shape):
    """The scripted executor's hidden states name the token and position of their row."""
    expected = scripted.greedy([1, 2], 30)
    speculator = speculation.make("mixed", shape, {"r0": expected}, 64, wants_hidden=True)
    engine = make_engine(speculator=speculator, **WIDE)
    engine.executor.hidden_size = 2
    drive.submit(engine, [1, 2], drive.greedy(30), request_id="r0")
    text = [1, 2, *expected]
    while engine.step():
        ((sequence,), hidden) = speculator.kept[-1]
        position = sequence.num_tokens - 2
        assert hidden.tolist() == [[text[position], position]]
    assert len(speculator.kept) == len(speculator.tree_steps) + len(speculator.plain_steps) - 1, "the last one ended"


def test_hidden_states_and_tokens_of_a_request_pair_up(make_engine, drive, speculation, scripted):
    for source in ("mixed", None):
        expected = scripted.greedy([1, 2], 30)
        speculator = speculation.make(source, "2x2", {"r0": expected}, 64) if source else None
        engine = make_engine(speculator=speculator, **WIDE)
        engine.executor.hidden_size = 2
        received = []
        engine.submit([1, 2], drive.greedy(30), on_output=lambda _: None, request_id="r0")
        with engine._worker._wake:
            request = engine._worker._inbox[0]
        request.on_hidden = lambda hidden, received=received: received.append(hidden.copy())
        request.on_output = lambda output, received=received: received.append(output)
        drive.run(engine)
        text = [1, 2, *expected]
        position = 1
        for hidden, output in zip(received[::2], received[1::2], strict=True):
            count = len(output.token_ids)
            assert hidden.tolist() == [[text[place], place] for place in range(position, position + count)]
            position += count
        assert position == len(text) - 1


def test_guesses_stay_right_while_requests_come_and_go(make_engine, drive, speculation, scripted):
    """Arrivals, aborts, a small pool and all sources at once; the answers are known."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, rng.integers(1, 20)).tolist() for _ in range(24)]
    truth = {f"r{index}": scripted.greedy(prompt, 30) for index, prompt in enumerate(prompts)}
    guessers = [
        speculation.Guesser(truth, speculation.shapes[shape], 64, right)
        for shape in ("chain of 4", "2x2", "26 nodes")
        for right in (lambda count: count % 4, None)
    ]
    speculator = speculation.Speculator(
        lambda sequence: guessers[sequence.order % 7](sequence) if sequence.order % 7 < 6 else None
    )
    engine = make_engine(speculator=speculator, max_seq_len=64, max_step_tokens=32, num_blocks=40)
    inboxes = {}
    for step in range(400):
        if step % 3 == 0 and len(inboxes) < len(prompts):
            name = f"r{len(inboxes)}"
            inboxes[name] = drive.submit(
                engine, prompts[len(inboxes)], drive.greedy(int(rng.integers(1, 31))), request_id=name
            )
        if step % 17 == 5:
            engine.abort(f"r{int(rng.integers(len(inboxes)))}")
        engine.step()
        engine.scheduler.check_integrity()
    drive.run(engine)
    assert len(inboxes) == len(prompts)
    for name, inbox in inboxes.items():
        assert inbox.reason in ("length", "abort")
        assert inbox.token_ids == truth[name][: len(inbox.token_ids)]
    assert engine.stats().preemptions
    assert any(each.path for each in speculator.verified)


def test_typical_acceptance_changes_sampled_texts_only_where_it_is_asked_for(make_engine, drive, speculation):
    """Lossy by name: guesses of likely tokens replace draws. Greedy requests keep their text."""
    params = {
        "greedy": SamplingParams(max_tokens=30, temperature=0),
        "sampled": SamplingParams(max_tokens=30, temperature=1.0, seed=3),
    }
    texts = {}
    for typical in (None, (0.0, 0.0), (0.01, 1.0)):
        speculator = None if typical is None else speculation.make("random", "26 nodes", {}, 64)
        engine = make_engine(speculator=speculator, **WIDE)
        if speculator is not None:
            speculator.typical = typical
        inboxes = {name: drive.submit(engine, [1, 2], each, request_id=name) for name, each in params.items()}
        drive.run(engine)
        texts[typical] = {name: inbox.token_ids for name, inbox in inboxes.items()}
    assert texts[0.0, 0.0] == texts[None]
    assert texts[0.01, 1.0]["greedy"] == texts[None]["greedy"]
    assert texts[0.01, 1.0]["sampled"] != texts[None]["sampled"]


def random_world(rng):
    """Limits, switches and requests of any kind that fit each other."""
    block_size = int(rng.integers(1, 7))
    max_seq_len = int(rng.integers(20, 50))
    chunked = bool(rng.integers(4))
    options = {
        "block_size": block_size,
        "max_seq_len": max_seq_len,
        "max_step_tokens": int(rng.integers(3, 40)) if chunked else max_seq_len,
        "max_seqs": int(rng.integers(1, 6)),
        "num_blocks": -(-max_seq_len // block_size) + int(rng.integers(0, 30)),
        "config": EngineConfig(
            prefix_cache=bool(rng.integers(2)), chunked_prefill=chunked, inflight_batching=bool(rng.integers(4))
        ),
    }
    requests = []
    shared = rng.integers(0, 64, 8).tolist()
    for _ in range(int(rng.integers(1, 9))):
        prompt = shared[: int(rng.integers(0, 9))] + rng.integers(0, 64, int(rng.integers(1, 10))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, max_seq_len - len(prompt) + 1)),
            temperature=float(rng.choice([0.0, 0.7, 1.2])),
            seed=int(rng.integers(1000)),
            top_p=float(rng.choice([0.6, 1.0])),
            frequency_penalty=float(rng.choice([0.0, 1.0])),
            stop_token_ids=tuple(rng.integers(0, 64, int(rng.integers(0, 4))).tolist()),
        )
        requests.append((prompt, params))
    return options, requests


@pytest.mark.parametrize("first_seed", range(0, 240, 80))
def test_any_limits_any_guesses_any_failures(make_engine, drive, speculation, first_seed):
    """Each answer is the one of the request alone in the world, or the beginning of it if something ended it early."""
    accepted = moved = preempted = ended_early = 0
    for seed in range(first_seed, first_seed + 80):
        rng = np.random.default_rng(seed)
        options, requests = random_world(rng)
        truth = {f"r{index}": drive.alone(prompt, params) for index, (prompt, params) in enumerate(requests)}
        guessers = [
            speculation.Guesser(truth, parents, 64, right, seed)
            for parents in speculation.shapes.values()
            for right in (None, lambda count: count % 5, lambda _: 1000)
        ]
        speculator = speculation.Speculator(
            lambda _, guessers=guessers, rng=rng: (
                guessers[int(rng.integers(len(guessers)))](_) if rng.random() < 0.8 else None
            )
        )
        engine = make_engine(speculator=speculator, **options)
        execute, move = engine.executor.execute, engine.executor.move

        def perhaps(function, *arguments, rng=rng):
            if rng.random() < 0.01:
                raise EngineError("a bad day")
            return function(*arguments)

        engine.executor.execute = lambda plan, execute=execute: perhaps(execute, plan)
        engine.executor.move = lambda *slots, move=move: perhaps(move, *slots)
        inboxes, left, steps = {}, list(enumerate(requests)), 0
        while left or engine._worker._unfinished:
            if left and rng.random() < 0.4:
                index, (prompt, params) = left.pop(0)
                inboxes[index] = drive.submit(engine, prompt, params, request_id=f"r{index}")
            if rng.random() < 0.02:
                engine.abort(f"r{int(rng.integers(len(requests)))}")
            speculator.is_idle = rng.random() < 0.1
            engine.step()
            engine.scheduler.check_integrity()
            steps += 1
            assert steps < 5000
        drive.assert_idle(engine)
        for index, (_, params) in enumerate(requests):
            inbox, expected = inboxes[index], truth[f"r{index}"]
            stop = next((n for n, token in enumerate(expected) if token in params.stop_token_ids), None)
            expected = expected if stop is None else expected[: stop + 1]
            if inbox.reason in ("abort", "error"):
                ended_early += 1
                assert inbox.token_ids == expected[: len(inbox.token_ids)]
            else:
                assert inbox.token_ids == expected, seed
                assert inbox.reason == ("length" if stop is None else "stop")
        accepted += sum(len(each.path) for each in speculator.verified)
        moved += engine.executor.num_moves
        preempted += engine.stats().preemptions
    assert min(accepted, moved, preempted, ended_early) > 0
