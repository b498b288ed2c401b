"""Heads that were published for another model: they are built in with a remark, guess badly, and change no text."""

import json

import pytest
import torch

from optimc.plan import Plan
from optimc_runtime.config import EngineConfig, SpeculationOptions
from optimc_runtime.engine import Engine
from optimc_runtime.request import SamplingParams

PROMPTS = [[5, 9, 30], [200, 3, 7, 7, 12]]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Three random heads with projections of their own, for a model of another name."""
    hidden, vocab = 64, 384
    torch.manual_seed(7)
    state = {}
    for head in range(3):
        state[f"{head}.0.linear.weight"] = torch.randn(hidden, hidden) / 8
        state[f"{head}.0.linear.bias"] = torch.randn(hidden)
        state[f"{head}.1.weight"] = torch.randn(vocab, hidden)
    folder = tmp_path_factory.mktemp("published")
    torch.save(state, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/else-7b"}))
    return folder


@pytest.mark.parametrize("backend", ["cpu", "onnxruntime"])
def test_imported_heads_serve_the_same_text(build, published, backend, monkeypatch):
    monkeypatch.setattr(
        "optimc_passes.heads.medusa._IMPORTED_TOKENS", 200
    )  # enough to measure what they are not good at
    passes = ["fuse", {"medusa": {"from": str(published), "bits": 8, "tree": "chain:2"}}]
    result = build(f"imported-{backend}", target={"backend": backend}, passes=passes)
    (report,) = (report for report in result.manifest.passes if report.name == "medusa")
    assert report.heads.source == "imported"
    assert any(line.startswith("the heads say base somebody/else-7b, this is ") for line in report.decisions)
    with Plan.open(result.path) as plan:
        assert plan.manifest.medusa.projection == "own"
        assert plan.manifest.medusa.tree.nodes == ((0,), (0, 0))
    texts = {}
    for mode in ("off", "medusa"):
        options = SpeculationOptions(mode, always=mode != "off")
        with Engine.load(result.path, EngineConfig(threads=1, speculation=options)) as engine:
            params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
            texts[mode] = [generation.token_ids for generation in engine.generate(PROMPTS, params)]
            if mode == "medusa":
                assert engine.stats().speculation.proposers["medusa"].drafted > 50
    assert texts["medusa"] == texts["off"]
