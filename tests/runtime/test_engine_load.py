"""From a plan file to an engine."""

import pytest

from optimc.errors import ConfigError, PlanCorruptError, PlanError
from optimc.plan import Plan, PlanTensor, write_plan
from optimc_runtime.config import EngineConfig
from optimc_runtime.engine import Engine


@pytest.fixture
def executors(monkeypatch, scripted):
    """Register the scripted executor as the plan's backend; lists those made, with the options they were given."""
    made = []

    def load(plan, *, kv_memory_bytes, threads):
        blocks = 8 if kv_memory_bytes is None else kv_memory_bytes // 1024
        executor = scripted.Executor(blocks, plan.manifest.kv.block_size, plan.manifest.model.vocab_size)
        made.append((executor, threads))
        return executor

    monkeypatch.setattr("optimc_runtime.engine.load_executor", load)
    return made


@pytest.fixture
def plan_path(tmp_path, scripted):
    path = tmp_path / "engine.plan"
    write_plan(path, scripted.manifest(), [PlanTensor.from_bytes("weights/a", b"some weights")])
    return path


def test_a_plan_without_tokenizer_serves_token_ids(executors, plan_path, drive, scripted):
    with Engine.load(plan_path, EngineConfig(kv_memory_bytes=20 * 1024, threads=3)) as engine:
        assert engine.tokenizer is None
        assert (engine.max_seq_len, engine.vocab_size, engine.limits.num_blocks) == (64, 64, 20)
        (generation,) = engine.generate([[1, 2]], drive.greedy(4))
    assert list(generation.token_ids) == scripted.greedy([1, 2], 4)
    ((executor, threads),) = executors
    assert (threads, executor.closed) == (3, True)


def test_a_damaged_plan_is_refused_unless_trusted(executors, plan_path):
    data = bytearray(plan_path.read_bytes())
    data[data.rindex(b"some weights")] ^= 1
    plan_path.write_bytes(data)
    with pytest.raises(PlanCorruptError, match="weights/a"):
        Engine.load(plan_path)
    assert not executors
    Engine.load(plan_path, trust=True).close()


def test_a_damaged_tokenizer_is_called_damaged_rather_than_unreadable(executors, tmp_path, scripted, byte_tokenizer):
    path = tmp_path / "engine.plan"
    tokenizer = PlanTensor.from_bytes("tokenizer/tokenizer.json", byte_tokenizer._backend.to_str().encode())
    write_plan(path, scripted.manifest(vocab_size=257), [tokenizer])
    Engine.load(path).close()
    data = bytearray(path.read_bytes())
    data[data.rindex(b'"vocab"')] = 0
    path.write_bytes(data)
    with pytest.raises(PlanCorruptError, match=r"tokenizer\.json' does not match its SHA-256"):
        Engine.load(path)
    with pytest.raises(PlanError, match=r"tokenizer\.json is not one the tokenizers library reads"):
        Engine.load(path, trust=True)


def test_an_opened_plan_may_be_closed_once_it_is_loaded(executors, plan_path, drive, scripted):
    with Plan.open(plan_path) as plan:
        engine = Engine.load(plan)
    with engine:
        (generation,) = engine.generate([[1, 2]], drive.greedy(2))
    assert list(generation.token_ids) == scripted.greedy([1, 2], 2)


def test_options_beyond_the_plan_release_the_executor(executors, plan_path):
    with pytest.raises(ConfigError, match="max_seqs: 9 exceeds the 8"):
        Engine.load(plan_path, EngineConfig(max_seqs=9))
    assert executors[0][0].closed


def test_a_pool_smaller_than_the_longest_sequence_is_announced(executors, plan_path, caplog):
    Engine.load(plan_path).close()
    assert "the KV pool holds 32 tokens" in caplog.text
