"""An engine that really guesses: answers, figures and refusals. The scripted executor trips over any wrong K/V."""

import numpy as np
import pytest

from optimc.errors import ConfigError, RequestError
from optimc.plan import PlanTensor, write_plan
from optimc.plan.tensor_names import TOKENIZER
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.executor.base import StepResult
from optimc_runtime.request import SamplingParams

WIDE = {"max_seq_len": 256, "max_step_tokens": 64, "num_blocks": 600}
LOOPING = {place: (3, 1, 4, 1, 5, 9, 2)[place % 7] for place in range(256) if place % 40 < 33}
"""Most tokens repeat every seven places; the rest is the hash's, so that guesses are wrong, too."""


def speculating(mode="ngram", **options):
    return EngineConfig(speculation=SpeculationOptions(mode, **options))


def answers(engine, drive, prompts, params):
    inboxes = [drive.submit(engine, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    drive.run(engine)
    return inboxes


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_without_guesses(make_engine, drive, batch, temperature, always):
    prompts = [[7, 8, order, 7, 8] for order in range(batch)]
    params = [
        SamplingParams(max_tokens=150, temperature=temperature, seed=order, stop_token_ids=(60,), logprobs=2)
        for order in range(batch)
    ]
    plain = answers(make_engine(script=LOOPING, **WIDE), drive, prompts, params)
    engine = make_engine(speculating(always=always), script=LOOPING, **WIDE)
    guessed = answers(engine, drive, prompts, params)
    for one, other in zip(plain, guessed, strict=True):
        assert other.token_ids == one.token_ids
        assert other.reason == one.reason
        assert other.outputs[-1].usage == one.outputs[-1].usage
    stats = engine.stats()
    figures = stats.speculation.proposers["ngram"]
    emitted = sum(len(inbox.token_ids) for inbox in guessed)
    assert stats.output_tokens == emitted
    assert stats.speculation.emitted == emitted - batch  # the first ones are prefill's
    assert sum(stats.speculation.position_accepted) == figures.accepted
    if always:
        assert 0 < figures.accepted < figures.drafted
        assert max(len(output.token_ids) for inbox in guessed for output in inbox.outputs) > 4
        assert stats.steps < emitted


def test_a_prefill_that_comes_token_by_token_is_no_decode(make_engine, drive):
    engine = make_engine(speculating(), max_step_tokens=1, max_seq_len=64)
    [inbox] = answers(engine, drive, [[1, 2, 3, 4]], [drive.greedy(5)])
    stats = engine.stats().speculation
    assert stats.sequence_steps == stats.emitted == len(inbox.token_ids)


def test_generate_and_stream_join_outputs_of_several_tokens(make_engine, drive):
    params = SamplingParams(max_tokens=80, temperature=0.8, seed=3, logprobs=1)
    plain, engine = make_engine(script=LOOPING, **WIDE), make_engine(speculating(always=True), script=LOOPING, **WIDE)
    [expected] = plain.generate([[1, 2]], params)
    [generation] = engine.generate([[1, 2]], params)
    assert generation.token_ids == expected.token_ids
    assert [each.token_id for each in generation.logprobs] == list(generation.token_ids)
    outputs = list(engine.stream([1, 2], params))
    assert len(outputs) < 60
    assert tuple(token for output in outputs for token in output.token_ids) == expected.token_ids
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)


def test_a_request_can_do_without(make_engine, drive):
    engine = make_engine(speculating(always=True), script=LOOPING, **WIDE)
    [inbox] = answers(engine, drive, [[1, 2]], [drive.greedy(60, speculation="off")])
    assert all(len(output.token_ids) <= 1 for output in inbox.outputs)
    assert engine.stats().speculation.proposers["ngram"].trees == 0
    [inbox] = answers(engine, drive, [[1, 2]], [drive.greedy(60, speculation="ngram")])
    assert engine.stats().speculation.proposers["ngram"].trees > 0


def test_a_proposer_the_engine_lacks_is_refused(make_engine, drive):
    engine = make_engine(speculating())
    with pytest.raises(RequestError, match="no proposer 'medusa', this engine has ngram") as refused:
        drive.submit(engine, [1], drive.greedy(1, speculation="medusa"))
    assert refused.value.param == "speculation"
    drive.submit(engine, [1], drive.greedy(1, speculation="auto"))
    plain = make_engine()
    with pytest.raises(RequestError, match="this engine does not speculate"):
        drive.submit(plain, [1], drive.greedy(1, speculation="ngram"))
    drive.submit(plain, [1], drive.greedy(1, speculation="off"))
    with pytest.raises(RequestError, match="speculation must be one of off, auto, medusa, ngram, draft, got 'magic'"):
        SamplingParams(speculation="magic")


def test_heads_that_a_plan_lacks_are_refused(make_engine):
    with pytest.raises(ConfigError, match="plan 'scripted' has no Medusa heads"):
        make_engine(speculating("medusa"))
    assert set(make_engine(speculating("auto")).stats().speculation.proposers) == {"ngram"}


def test_without_speculation_there_are_no_figures_of_it(make_engine):
    engine = make_engine()
    assert engine.stats().speculation is None
    assert engine.step_costs is None
    engine.profile_steps()  # and nothing to measure


def test_steps_are_profiled_on_free_blocks(make_engine):
    engine = make_engine(speculating(), num_blocks=64, max_seq_len=128, max_step_tokens=16)
    rows = []

    def execute(plan):  # what the context holds means nothing here
        rows.append(len(plan.tokens))
        return StepResult(np.zeros((len(plan.logits_rows), 64), np.float32))

    engine.executor.execute = execute
    engine.profile_steps(0.02)
    assert {1, 4} <= set(rows)
    assert engine.scheduler.pool.num_free == 64
    assert engine.step_costs.seconds(1, 1) < 1e-3
    assert engine.stats().steps == 0


@pytest.fixture
def plans(tmp_path, scripted, byte_tokenizer, monkeypatch):
    """Write plans of the scripted backend: (name, tokenizer's JSON, vocabulary) to path."""

    def load(plan, *, kv_memory_bytes=None, threads=None):
        manifest = plan.manifest
        return scripted.Executor(600, manifest.kv.block_size, manifest.model.vocab_size)

    for module in ("engine", "speculate.build_speculator"):
        monkeypatch.setattr(f"optimc_runtime.{module}.load_executor", load)

    def write(name, tokenizer, vocab_size=257):
        path = tmp_path / f"{name}.plan"
        manifest = scripted.manifest(vocab_size=vocab_size, max_seq_len=128, max_step_tokens=64)
        write_plan(path, manifest, [PlanTensor.from_bytes(TOKENIZER, tokenizer)])
        return path

    return write


def test_another_plan_drafts_and_changes_nothing(plans, byte_tokenizer, drive, scripted):
    json = byte_tokenizer._backend.to_str().encode()
    target, draft = plans("target", json), plans("draft", json)
    config = EngineConfig(speculation=SpeculationOptions("draft", draft, always=True, max_nodes=3))
    with Engine.load(target, config) as engine:
        [generation] = engine.generate([[1, 2, 3]], drive.greedy(40))
        figures = engine.stats().speculation.proposers["draft"]
    assert list(generation.token_ids) == scripted.greedy([1, 2, 3], 40, 257)
    assert figures.accepted == figures.drafted > 20  # the same model guesses right


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "message"),
    [(b"", 257, "different tokenizers"), (None, 300, "has a vocabulary of 300, .* one of 257")],
)
def test_a_draft_that_speaks_other_tokens_is_refused(plans, byte_tokenizer, tokenizer, vocab_size, message):
    json = byte_tokenizer._backend.to_str().encode()
    other = json.replace(b"<end>", b"<fin>") if tokenizer is not None else json
    target, draft = plans("target", json), plans("draft", other, vocab_size)
    with pytest.raises(ConfigError, match=message):
        Engine.load(target, EngineConfig(speculation=SpeculationOptions("draft", draft)))
