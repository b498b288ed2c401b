import os
from pathlib import Path

import pytest

from optimc.cli.engine_options import load_engine, speculation_options
from optimc.errors import ConfigError


def test_more_threads_than_cores_are_refused_before_the_plan_is_read():
    with pytest.raises(ConfigError, match=r"--threads: \d+ exceeds this machine's \d+ cores"):
        load_engine(Path("absent.plan"), threads=(os.cpu_count() or 1) + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 0}, "--max-seqs: must be an integer of at least 1, got 0"),
        ({"kv_memory": "0"}, "--kv-memory: must be an integer of at least 1, got 0"),
        ({"max_queued_tokens": -1}, "--max-queued-tokens: must be"),
        ({"policy": "lifo"}, "--policy: must be one of fcfs, shortest-prompt, priority, got 'lifo'"),
        ({"ageing_s": 0.0}, "--ageing: must be a number of seconds above 0, got 0.0"),
        ({"gap_factor": 0.5}, "--max-gap-factor: must be above 1, or 0 for no limit, got 0.5"),
        ({"ttft_slo_ms": -5.0}, "--slo-ttft-ms: must be a number of milliseconds above 0, got -5"),
        ({"ttft_slo_ms": float("nan")}, "--slo-ttft-ms: must be a number of milliseconds above 0, got nan"),
    ],
)
def test_faults_name_the_option_and_the_number_as_they_were_given(options, message):
    with pytest.raises(ConfigError, match=message):
        load_engine(Path("absent.plan"), **options)


def test_speculation_is_what_the_options_say_together():
    assert speculation_options(None, none=False, default="auto").mode == "auto"
    assert speculation_options(None, none=True, default="auto").mode == "off"
    assert speculation_options("off", none=False, default="auto").mode == "off"
    drafted = speculation_options("draft=small.plan", none=False, default="auto")
    assert (drafted.mode, drafted.draft_plan) == ("draft", Path("small.plan"))
    lossy = speculation_options("ngram", none=False, default="auto", lossy_acceptance="typical", typical_delta=0.5)
    assert (lossy.acceptance, lossy.epsilon, lossy.delta) == ("typical", 0.09, 0.5)
    assert speculation_options("ngram", none=False, default="auto").acceptance == "exact"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wanted": "ngram", "none": True}, "--no-speculation: contradicts --speculation ngram"),
        ({"wanted": "magic"}, "must be auto, medusa, ngram, draft=PLAN or off, got 'magic'"),
        ({"wanted": "draft="}, "got 'draft='"),
        ({"wanted": None, "lossy_acceptance": "all"}, "--lossy-acceptance: must be typical, got 'all'"),
        ({"wanted": None, "typical_epsilon": 0.1}, "--typical-epsilon: needs --lossy-acceptance typical"),
        ({"wanted": "off", "lossy_acceptance": "typical"}, "--lossy-acceptance: needs speculation, which is off"),
        ({"wanted": None, "lossy_acceptance": "typical", "typical_delta": 2.0}, "delta: must be above 0"),
    ],
)
def test_contradicting_options_of_speculation_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        speculation_options(**{"none": False, "default": "auto", **options})
