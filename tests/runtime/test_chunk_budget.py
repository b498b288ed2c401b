"""What a step has time for, by a machine whose steps take what we say."""

import pytest

from optimc_runtime.chunk_budget import LEAST_TOKENS, MOST_UNMEASURED, ChunkBudget


def machine(fixed_s, decode_s, token_s):
    return lambda decodes, chunk: fixed_s + decodes * decode_s + chunk * token_s


def drive(budget, seconds, decodes, steps):
    """Steps of `decodes` sequences beside an endless prompt; return (chunk, seconds) of each."""
    taken = []
    for _ in range(steps):
        chunk = budget.tokens(decodes)
        taken.append((chunk, seconds(decodes, chunk)))
        budget.learn(decodes, chunk, taken[-1][1])
    return taken


@pytest.mark.parametrize("gap_factor", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("token_s", [2e-5, 2e-4, 8e-4])
@pytest.mark.parametrize("decodes", [4, 15, 64])
def test_a_step_with_a_chunk_takes_no_longer_than_the_factor_says(gap_factor, token_s, decodes):
    seconds = machine(4e-3, 2e-4, token_s)
    budget = ChunkBudget(gap_factor, floor_s=0.0)
    plain_s = seconds(decodes, 0)
    taken = drive(budget, seconds, decodes, 400)
    least_s = seconds(decodes, LEAST_TOKENS)
    assert all(step_s <= max(1.05 * gap_factor * plain_s, least_s) for _, step_s in taken)
    settled = [chunk for chunk, _ in taken[-100:] if chunk]
    ideal = (gap_factor - 1) * plain_s / token_s
    assert min(settled) >= min(0.9 * ideal, ideal - 1) or min(settled) == LEAST_TOKENS


def test_a_plain_step_is_asked_for_first_and_now_and_then():
    budget = ChunkBudget(2.0)
    taken = drive(budget, machine(4e-3, 2e-4, 1e-4), 15, 5 * (MOST_UNMEASURED + 1))
    plain = [place for place, (chunk, _) in enumerate(taken) if chunk == 0]
    assert plain[0] == 0
    assert len(plain) == 5


def test_a_plain_step_that_failed_holds_nobody_up():
    budget = ChunkBudget(2.0)
    assert budget.tokens(3) == 0
    assert budget.tokens(3) == LEAST_TOKENS


def test_few_decodes_do_not_mind_a_step_of_the_floor():
    seconds = machine(2e-3, 0.0, 1e-4)
    chunks = {decodes: drive(ChunkBudget(2.0), seconds, decodes, 120)[-1][0] for decodes in (1, 2, 15)}
    assert chunks[1] == pytest.approx(130, abs=2)  # 15 ms
    assert chunks[2] == pytest.approx(55, abs=2)  # 7.5 ms
    assert chunks[15] == pytest.approx(20, abs=2)  # twice 2 ms


def test_it_follows_a_machine_that_slows_down_and_one_odd_step_changes_little():
    budget = ChunkBudget(2.0, floor_s=0.0)
    fast, slow = machine(5e-3, 0.0, 5e-5), machine(5e-3, 0.0, 5e-4)
    before = drive(budget, fast, 8, 120)[-1][0]
    assert before == pytest.approx(100, abs=3)
    budget.learn(8, before, 1.0)
    assert budget.tokens(8) > before / 2
    assert drive(budget, slow, 8, 60)[-1][0] == pytest.approx(10, abs=2)


def test_a_prompt_alone_is_the_first_measurement_of_a_token():
    budget = ChunkBudget(2.0, floor_s=0.0)
    budget.learn(0, 500, 0.05)
    budget.learn(8, 0, 0.005)
    budget.tokens(8)
    assert budget.tokens(8) == pytest.approx(50, abs=1)


def test_all_chunks_of_a_step_are_cut_together_and_decodes_go_on(rig):
    """Streams decode in every step while prompts come; the machine takes 5 ms and 0.1 ms per token."""
    budget = ChunkBudget(2.0, floor_s=0.0)
    r = rig(num_blocks=400, max_step_tokens=256, max_seqs=16, max_seq_len=400, chunk_budget=budget)
    streams = [r.add([i], 60) for i in range(6)]
    r.step(execute_s=0.005)
    for i in range(3):
        r.add([i] * 300, 1)
    mixed = 0
    while any(sequence.wants_token for sequence in streams):
        before = [sequence.num_output for sequence in streams]
        step = r.scheduler.schedule()
        counts = [item.num_tokens for item in step.work]
        chunk = sum(count for count in counts if count > 1)
        r.scheduler.observe(step, 0.005 + 1e-4 * chunk)
        r.executor.execute(step.plan)
        r.scheduler.commit(step)
        for item in step.work:
            if item.num_logits:
                item.sequence.append(1)
            if not item.sequence.wants_token:
                r.scheduler.release(item.sequence)
        assert [each.num_output for each in streams] == [count + 1 for count in before]
        if chunk:
            mixed += 1
            assert 1e-4 * chunk <= 1.1 * 0.005
    assert mixed > 10
    assert r.scheduler.prefilled_tokens > 500
    assert 40 <= r.scheduler.chunk_budget_tokens <= 55


@pytest.mark.parametrize("options", [{}, {"chunked_prefill": False, "chunk_budget": ChunkBudget(2.0)}])
def test_nothing_is_cut_without_a_budget_or_without_chunks(rig, options):
    r = rig(num_blocks=64, max_step_tokens=32, max_seq_len=100, **options)
    r.add([1], 9)
    r.step()
    prompt = r.add([2] * 31, 2)
    r.step()
    assert prompt.num_computed == 31
    assert r.scheduler.chunk_budget_tokens == 0


def test_the_budget_of_chunks_is_on_unless_switched_off(make_engine, drive):
    cut, uncut = make_engine(max_step_tokens=32, gap_factor=2.0), make_engine(max_step_tokens=32)
    for engine in (cut, uncut):
        drive.submit(engine, [1] * 3, drive.greedy(40))
        engine.step()
        drive.submit(engine, [2] * 30, drive.greedy(1))
        engine.step()  # with a budget, a plain one: it is to be measured
    assert (cut.stats().prompt_tokens, uncut.stats().prompt_tokens) == (3, 33)
    for engine in (cut, uncut):
        drive.run(engine)
    assert cut.stats().prompt_tokens == 33
