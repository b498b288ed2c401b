"""The pass as a whole, on a model that is run as a build would run the real one."""

from __future__ import annotations

import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from optimc.errors import CheckpointError, MissingExtraError, PassError
from optimc_passes.cache import ArtifactCache
from optimc_passes.heads import trainer
from optimc_passes.heads.heads import DRAFT_VOCAB, SHARED_PROJECTION
from optimc_passes.heads_stage import run_heads_stage
from optimc_passes.pipeline import check_order
from optimc_passes.pipeline_options import PipelineOptions
from optimc_passes.registry import PASSES, make_pass
from optimc_passes.weights import Quantized

OPTIONS = {
    "heads": 2,
    "draft_vocab": 40,
    "batch_tokens": 64,
    "epochs": 2.0,
    "data": {"chat_tokens": 1200, "prose_tokens": 300, "max_tokens": 32},
}


def medusa(**changes):
    return make_pass("medusa", OPTIONS | changes)


def data(**changes):
    return {"data": OPTIONS["data"] | changes}


def stage(artifact, opener, cache, **changes):
    """Run the pass as a build does, with a cache."""
    options = PipelineOptions(cache=ArtifactCache(cache), models=opener)
    after, (report,) = run_heads_stage([medusa(**changes)], artifact, options, ("fuse",))
    return after.heads, report


def content(heads):
    """The bytes of all weights."""
    arrays = {}
    for name, weight in heads.weights.items():
        parts = (weight.codes, weight.scales) if isinstance(weight, Quantized) else (weight,)
        arrays[name] = b"".join(part.read().tobytes() for part in parts)
    return arrays


@pytest.fixture(scope="module")
def outcome(artifact, make_opener):
    """The pass run once without a cache."""
    opener = make_opener()
    after, (report,) = run_heads_stage([medusa()], artifact, PipelineOptions(models=opener), ())
    return after, report


def test_heads_are_described_and_have_their_weights(outcome, artifact):
    heads = outcome[0].heads
    info = heads.info
    assert (info.num_heads, info.num_blocks, info.draft_vocab_size, info.bits) == (2, 1, 40, 8)
    assert info.conditioned
    assert info.draft_vocab == "heads/draft_vocab"
    assert info.base_hash == artifact.checkpoint.digest
    assert heads.weights["1.blocks.0.weight"].shape == (32, 64)
    assert heads.weights["1.blocks.0.weight"].bits == 8
    assert heads.weights[SHARED_PROJECTION].shape == (40, 32)
    ids = heads.weights[DRAFT_VOCAB].read()
    assert ids.dtype == np.int32
    assert (np.diff(ids) > 0).all()
    head = artifact.weights["lm_head.weight"].read()
    np.testing.assert_array_equal(heads.weights[SHARED_PROJECTION].read(), head[ids])


def test_the_report_says_what_was_trained_and_measured(outcome):
    report = outcome[1].heads
    assert report.source == "trained"
    assert set(report.tokens) == set(report.heldout_tokens) == {"chat", "prose"}
    assert report.tokens["chat"] > 900
    assert set(report.seconds) == {"sample", "train", "measure"}
    assert report.history[0][0] == 0
    assert report.resumed_at_step is None
    assert {entry.quantized for entry in report.accuracies} == {False, True}
    assert "head_1_chat" in outcome[1].metrics
    assert any("rounded to 8 bits" in decision for decision in outcome[1].decisions)
    assert outcome[0].heads.info.tree.costs
    assert outcome[0].heads.info.tree.machine == "a fake"


def test_a_model_without_a_chat_template_gets_more_prose(artifact, opener, tmp_path):
    opener.options = {"chat": None, "no_chat": "the checkpoint has no chat template"}
    _, report = stage(artifact, opener, tmp_path, epochs=0.5)
    assert set(report.heads.tokens) == {"prose"}
    assert report.decisions[0].startswith("no conversations: the checkpoint has no chat template; 1,500 tokens of")


def test_a_model_with_neither_template_nor_text_is_refused(artifact, opener, tmp_path):
    opener.options = {"chat": None, "no_chat": "the checkpoint has no chat template"}
    with pytest.raises(PassError, match="no conversations can be sampled .*; add a calibration section"):
        stage(artifact.evolve(calibration=None), opener, tmp_path, **data(prose_tokens=0))


def test_a_model_whose_answers_end_at_once_is_refused(artifact, opener, tmp_path):
    opener.options = {"eos": frozenset(range(64))}
    with pytest.raises(PassError, match="no answer or continuation had 8 tokens; give other data, or raise limits"):
        stage(artifact, opener, tmp_path)


def test_where_the_target_cannot_run_the_calibration_text_is_walked(artifact, opener, tmp_path):
    opener.refusal = MissingExtraError("onnxruntime", "ort", "running a plan")
    heads, report = stage(artifact, opener, tmp_path, epochs=0.5)
    assert "computed in float32" in report.decisions[0]
    assert "onnxruntime" in report.decisions[0]
    assert set(report.heads.tokens) == {"prose"}
    assert heads.info.tree.costs == ()


@pytest.mark.parametrize("bits", [4, 16])
def test_bits_are_those_asked_for_and_the_drop_is_in_the_report(artifact, opener, tmp_path, bits):
    heads, report = stage(artifact, opener, tmp_path, bits=bits, epochs=0.5)
    assert heads.info.bits == (None if bits == 16 else 4)
    weight = heads.weights["0.blocks.0.weight"]
    assert (weight.bits == 4) if bits == 4 else (weight.dtype.name == "bfloat16")
    assert any("rounded to 4 bits" in decision for decision in report.decisions) == (bits == 4)
    pairs = {}
    for entry in report.heads.accuracies:
        pairs.setdefault((entry.head, entry.kind), []).append(entry)
    assert all(len(pair) == 2 for pair in pairs.values())


def test_a_second_build_takes_heads_from_the_cache(artifact, opener, tmp_path):
    first, report = stage(artifact, opener, tmp_path, epochs=0.5)
    again, cached = stage(artifact, opener, tmp_path, epochs=0.5)
    assert (report.cached, cached.cached) == (False, True)
    assert len(opener.opened) == 1
    assert content(again) == content(first)
    assert again.info == first.info


def test_another_target_trains_other_heads(artifact, opener, tmp_path):
    stage(artifact, opener, tmp_path, epochs=0.25)
    opener.key = "another"
    _, report = stage(artifact, opener, tmp_path, epochs=0.25)
    assert not report.cached


@pytest.mark.parametrize("call", [2, 4])
def test_a_build_killed_while_sampling_goes_on_where_it_was(artifact, opener, tmp_path, call):
    whole, _ = stage(artifact, opener, tmp_path / "whole", epochs=0.5)
    opener.options = {"fail_at": call}
    with pytest.raises(KeyboardInterrupt):
        stage(artifact, opener, tmp_path / "cut", epochs=0.5)
    opener.options = {}
    resumed, _ = stage(artifact, opener, tmp_path / "cut", epochs=0.5)
    assert content(resumed) == content(whole)
    calls = [len(model.calls) for model in opener.opened]
    assert calls[1] + calls[2] <= calls[0] + 3, "at most a round is done twice"


def test_a_build_killed_while_training_ends_in_the_same_bytes(artifact, opener, tmp_path, monkeypatch):
    whole, _ = stage(artifact, opener, tmp_path / "whole")
    monkeypatch.setattr(trainer, "SAVE_S", 0.0)
    step, done = trainer.Trainer._step, []

    def killed(self, batch, progress, number):
        done.append(progress)
        if len(done) == 12:
            raise KeyboardInterrupt
        step(self, batch, progress, number)

    monkeypatch.setattr(trainer.Trainer, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        stage(artifact, opener, tmp_path / "cut")
    monkeypatch.setattr(trainer.Trainer, "_step", step)
    resumed, report = stage(artifact, opener, tmp_path / "cut")
    assert report.heads.resumed_at_step == 11
    assert content(resumed) == content(whole)
    assert not any((tmp_path / "cut" / "partial").iterdir())


def test_a_harmed_state_of_training_is_started_again(artifact, opener, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "SAVE_S", 0.0)
    whole, _ = stage(artifact, opener, tmp_path / "whole", epochs=0.5)
    key_folder = []
    save = trainer.Trainer._save

    def harm(self, path, state):
        save(self, path, state)
        path.write_bytes(path.read_bytes()[:-100])
        key_folder.append(path.parent)
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.Trainer, "_save", harm)
    with pytest.raises(KeyboardInterrupt):
        stage(artifact, opener, tmp_path / "cut", epochs=0.5)
    monkeypatch.setattr(trainer.Trainer, "_save", save)
    resumed, report = stage(artifact, opener, tmp_path / "cut", epochs=0.5)
    assert report.heads.resumed_at_step is None
    assert content(resumed) == content(whole)


def test_heads_come_last_and_once():
    rtn, fusion, heads = PASSES["rtn"], PASSES["swiglu"], PASSES["medusa"]
    assert check_order([rtn, fusion, heads]) == []
    assert check_order([heads, rtn]) == [(1, "rtn changes weights and must come before medusa")]
    assert check_order([heads, fusion]) == [(1, "swiglu rewrites the graph and must come before medusa")]
    assert check_order([fusion, heads, heads]) == [
        (2, "medusa adds heads, and medusa has added them already; keep one")
    ]


@pytest.fixture
def published(artifact, tmp_path):
    """Heads as others publish them: two of one block, over the model's own output head."""
    rng = np.random.default_rng(2)
    folder = tmp_path / "published"
    folder.mkdir()
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = rng.standard_normal((32, 32)).astype(np.float32) / 8
        tensors[f"{head}.0.linear.bias"] = np.zeros(32, np.float32)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    return folder


def imported(artifact, opener, cache, folder, **options):
    options = {"from": str(folder)} | options
    made = PipelineOptions(cache=ArtifactCache(cache), models=opener)
    after, (report,) = run_heads_stage([make_pass("medusa", options)], artifact, made, ("fuse",))
    return after.heads, report


def test_heads_that_are_taken_over_are_rounded_measured_and_get_a_tree(artifact, opener, tmp_path, published):
    heads, report = imported(artifact, opener, tmp_path / "cache", published, tree="chain:2")
    assert report.heads.source == "imported"
    assert report.heads.heldout_tokens["chat"] > 10_000
    assert heads.info.bits == 8
    assert heads.info.accuracies
    assert heads.info.tree.nodes == ((0,), (0, 0))
    assert opener.opened[0].calls, "conversations were sampled to measure them"


@pytest.mark.parametrize("tree", ["chain:3", [[0], [0, 0], [0, 0, 0]]])
def test_a_tree_deeper_than_the_heads_taken_over_is_refused_before_sampling(
    artifact, opener, tmp_path, published, tree
):
    with pytest.raises(PassError, match="tree: it is 3 deep and there are 2 heads in .*published"):
        imported(artifact, opener, tmp_path / "cache", published, tree=tree)
    assert not opener.opened


def test_heads_that_cannot_be_measured_are_believed_and_the_report_says_why(artifact, opener, tmp_path, published):
    opener.refusal = MissingExtraError("onnxruntime", "ort", "running a plan")
    bare = artifact.evolve(calibration=None)
    heads, report = imported(bare, opener, tmp_path / "cache", published)
    assert heads.info.accuracies == ()
    assert heads.info.tree.expected_tokens is None
    assert any("the heads were not measured: the model cannot be sampled from" in line for line in report.decisions)


def test_other_files_under_the_same_name_are_other_heads(artifact, published):
    pass_ = make_pass("medusa", {"from": str(published)})
    before = pass_.result_key(artifact)
    assert pass_.result_key(artifact) == before
    (published / "config.json").write_text('{"medusa_num_heads": 2}')
    assert pass_.result_key(artifact) != before


def test_heads_are_known_by_the_files_that_are_read(artifact, published, tmp_path):
    def key(place):
        return make_pass("medusa", {"from": str(place)}).result_key(artifact)

    file = published / "medusa_lm_head.safetensors"
    folder_key, file_key = key(published), key(file)
    (published / "pytorch_model.bin").write_bytes(b"the model beside them")
    assert key(published) == folder_key
    (published / "config.json").write_text('{"medusa_num_heads": 2}')
    assert key(file) != file_key, "a file is read with the configuration beside it"
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="no Medusa heads"):
            key(place)
