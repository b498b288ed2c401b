"""Every weight pass is reported with what it did to predictions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc_passes.artifact import Artifact
from optimc_passes.cache import ArtifactCache
from optimc_passes.pipeline_options import PipelineOptions
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.walk.budget import Budget
from optimc_passes.walk.quality import QualityProbe
from optimc_passes.weight_stage import run_weight_stage

WINDOWS = np.random.default_rng(3).integers(0, 96, (2, 30)).astype(np.int32)
BODY = Rtn(RtnConfig(bits=3, group_size=16, only=("*.mlp.*",)))
REST = Rtn(RtnConfig(bits=3, group_size=16, only=("*.self_attn.*",)))


@pytest.fixture(scope="module")
def llama(make_family: Callable[..., Any]) -> Any:
    return make_family("llama")


def test_what_one_pass_leaves_is_what_the_next_begins_with(llama: Any):
    options = PipelineOptions(quality_windows=WINDOWS)
    after, reports = run_weight_stage([BODY, REST], Artifact.start(llama.checkpoint), options)
    first, second = (report.quality for report in reports)
    assert first is not None
    assert second is not None
    probe = QualityProbe(llama.checkpoint, WINDOWS, scratch=None, budget=Budget(None, 0))
    assert (first.perplexity_before, first.kl_before) == probe.measure(llama.checkpoint.weights)
    assert (first.perplexity_after, first.kl_after) == (second.perplexity_before, second.kl_before)
    assert (second.perplexity_after, second.kl_after) == probe.measure(after.weights)
    assert 0 == first.kl_before < first.kl_after < second.kl_after
    assert first.tokens == 2 * 29


def test_figures_come_back_from_the_cache_unless_other_windows_are_asked_for(llama: Any, tmp_path: Path):
    def run(windows: Any) -> Any:
        options = PipelineOptions(cache=ArtifactCache(tmp_path), quality_windows=windows)
        (report,) = run_weight_stage([BODY], Artifact.start(llama.checkpoint), options)[1]
        return report

    fresh, cached, other = run(WINDOWS), run(WINDOWS), run(WINDOWS[:1])
    assert not fresh.cached
    assert cached.cached
    assert cached.quality == fresh.quality
    assert other.cached
    assert other.quality.tokens == 29


def test_why_nothing_was_measured_is_said(llama: Any):
    options = PipelineOptions(unmeasured="there is no tokenizer")
    (report,) = run_weight_stage([BODY], Artifact.start(llama.checkpoint), options)[1]
    assert report.quality is None
    assert "predictions were not measured: there is no tokenizer" in report.decisions
