from pathlib import Path

import pytest

from optimc.errors import ConfigError
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.executor.base import KvPoolInfo


def test_all_faults_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(max_seqs=0, threads=-1, max_queued_requests=-1, prefix_cache="yes", max_step_tokens=True)
    assert [fault.where for fault in caught.value.faults] == [
        "max_seqs",
        "max_step_tokens",
        "threads",
        "max_queued_requests",
        "prefix_cache",
    ]


def test_options_of_scheduling_are_checked():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(policy="sjf", ageing_s=0, gap_factor=1, ttft_slo_s=-1)
    assert [fault.where for fault in caught.value.faults] == ["policy", "ageing_s", "gap_factor", "ttft_slo_s"]
    assert "one of fcfs, shortest-prompt, priority, got 'sjf'" in str(caught.value)
    for options in ({"ageing_s": float("nan")}, {"gap_factor": float("inf")}, {"gap_factor": -1}, {"ttft_slo_s": True}):
        with pytest.raises(ConfigError):
            EngineConfig(**options)
    assert EngineConfig(gap_factor=0, ttft_slo_s=0.5).policy == "fcfs"


def test_options_beyond_the_plan_are_refused_in_words(scripted):
    manifest = scripted.manifest(max_seq_len=64, max_seqs=3, max_step_tokens=16)
    config = EngineConfig(max_seq_len=128, max_seqs=4, max_step_tokens=17)
    with pytest.raises(ConfigError) as caught:
        config.resolve(manifest, KvPoolInfo(8, 4, 1024))
    assert str(caught.value).splitlines() == [
        "engine options for plan 'scripted': 3 faults",
        "  max_seqs: 4 exceeds the 3 the plan was built for; rebuild it with larger limits",
        "  max_step_tokens: 17 exceeds the 16 the plan was built for; rebuild it with larger limits",
        "  max_seq_len: 128 exceeds the 64 the plan was built for; rebuild it with larger limits",
    ]


def test_a_pool_without_blocks_or_with_other_blocks_is_refused(scripted):
    with pytest.raises(ConfigError, match="kv_memory_bytes: holds no block; one takes 1,024 bytes"):
        EngineConfig().resolve(scripted.manifest(), KvPoolInfo(0, 4, 1024))
    with pytest.raises(ConfigError, match="the executor's blocks have 8 slots, the plan's 4"):
        EngineConfig().resolve(scripted.manifest(block_size=4), KvPoolInfo(1, 8, 1024))


def test_limits_come_from_the_plan_narrowed_by_options_and_pool(scripted):
    manifest = scripted.manifest(max_seq_len=64, max_seqs=8, max_step_tokens=16)
    limits = EngineConfig(max_seqs=2, max_seq_len=40).resolve(manifest, KvPoolInfo(8, 4, 1024))
    assert (limits.max_seqs, limits.max_step_tokens, limits.max_seq_len) == (2, 16, 40)
    assert limits.max_request_tokens == 32
    assert EngineConfig(max_step_tokens=1).resolve(manifest, KvPoolInfo(8, 4, 1024)).max_running == 1


def test_speculation_is_off_unless_asked_for():
    assert EngineConfig().speculation == SpeculationOptions()
    assert SpeculationOptions().mode == "off"
    assert SpeculationOptions.parse("draft=a=b.plan").draft_plan == Path("a=b.plan")


def test_all_faults_of_speculation_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        SpeculationOptions("ngram", Path("a.plan"), max_nodes=0, acceptance="some", epsilon=0, delta=float("nan"))
    named = [fault.where for fault in caught.value.faults]
    assert named == ["draft_plan", "max_nodes", "acceptance", "epsilon", "delta"]
    for options in (
        {"mode": "draft"},
        {"mode": "magic"},
        {"ngram_min": 5, "ngram_max": 4},
        {"max_nodes": 257},
        {"epsilon": "0.1"},
        {"always": 1},
    ):
        with pytest.raises(ConfigError):
            SpeculationOptions(**options)
