import os
from pathlib import Path

import pytest

from optimc.cli.engine_options import load_engine, speculation_options
from optimc.errors import ConfigError


def test_more_threads_than_cores_are_refused_before_the_plan_is_read():
    with pytest.raises(ConfigError, match=r"--threads: \d+ exceeds this machine's \d+ cores"):
        load_engine(Path("absent.plan"), threads=(os.cpu_count() or 1) + 1)


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
