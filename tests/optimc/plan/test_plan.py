"""The plan file: written in one step, read without copying, refused in words."""

import errno
import json
import os
import weakref
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from optimc.errors import PlanCorruptError, PlanError, PlanVersionError, StorageError
from optimc.plan import (
    FORMAT_VERSION,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    PlanTensor,
    Quality,
    Source,
    TargetInfo,
    TokenIds,
    looks_like_a_plan,
    record_quality,
    write_plan,
)
from optimc.plan.container import ALIGNMENT


@pytest.fixture
def manifest():
    return Manifest(
        format_version=FORMAT_VERSION,
        name="tiny",
        target=TargetInfo(backend="onnxruntime"),
        model=ModelInfo(architecture="LlamaForCausalLM", vocab_size=384, hidden_size=64, num_layers=1),
        limits=Limits(max_seq_len=64, max_step_tokens=16, max_seqs=3, kv_memory_bytes=1 << 20),
        kv=KvLayout(block_size=4, dtype="float32", layers=(KvLayer(num_kv_heads=2, head_dim=16, window=0),)),
        tokens=TokenIds(bos=None, eos=(1, 2), pad=None),
        source=Source(
            model="m",
            model_hash="0",
            recipe={},
            recipe_hash="1",
            calibration_hash=None,
            build_key="2",
            tools={"optimc": "0"},
        ),
    )


ARRAYS = {
    "weights/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "weights/odd": np.arange(7, dtype=np.int8),
    "weights/empty": np.zeros((0, 5), np.float32),
    "weights/scalar": np.array(3.5, np.float32),
}


@pytest.fixture
def path(tmp_path, manifest):
    path = tmp_path / "engine.plan"
    tensors = [PlanTensor.from_array(name, array) for name, array in ARRAYS.items()]
    write_plan(path, manifest, [*tensors, PlanTensor.from_bytes("tokenizer/tokenizer.json", b"{}")])
    return path


def test_what_was_written_is_read_back(path, manifest):
    with Plan.open(path, verify=True) as plan:
        assert plan.manifest.model_copy(update={"tensors": {}}) == manifest
        assert {spec.name for spec in plan} == {*ARRAYS, "tokenizer/tokenizer.json"}
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(plan.tensor(name), array)
        assert plan.blob("tokenizer/tokenizer.json") == b"{}"
        assert plan.size_bytes == path.stat().st_size


def test_every_tensor_is_aligned_and_read_only(path):
    plan = Plan.open(path)
    for spec in plan:
        assert spec.offset % ALIGNMENT == 0
    assert not plan.tensor("weights/a").flags.writeable
    assert plan.tensor("weights/a").base is not None


def test_it_is_a_safetensors_file_for_everybody_else(path):
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("weights/a"), ARRAYS["weights/a"])
        assert json.loads(file.metadata()["optimc.manifest"])["name"] == "tiny"


def test_views_outlive_close(path):
    plan = Plan.open(path)
    view = plan.tensor("weights/a")
    plan.close()
    np.testing.assert_array_equal(view, ARRAYS["weights/a"])


def test_tensors_are_loaded_one_at_a_time(tmp_path, manifest):
    alive = []

    def load(index):
        assert not alive, "the previous tensor was still held"
        array = np.full(1000, index, np.int32)
        alive.append(index)
        weakref.finalize(array, alive.clear)
        return array

    tensors = [PlanTensor(f"t{i}", "I32", (1000,), lambda i=i: load(i)) for i in range(4)]
    write_plan(tmp_path / "p", manifest, tensors)
    assert Plan.open(tmp_path / "p").tensor("t3")[0] == 3


def test_a_failed_write_leaves_nothing_and_keeps_the_old_plan(path, manifest):
    before = path.read_bytes()

    def fail():
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_plan(path, manifest, [PlanTensor("x", "U8", (4,), fail)])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["engine.plan"]


def test_a_tensor_that_is_not_what_it_declared_is_refused(tmp_path, manifest):
    with pytest.raises(ValueError, match="declared 16 bytes, loaded 8"):
        write_plan(tmp_path / "p", manifest, [PlanTensor("x", "F32", (4,), lambda: np.zeros(2, np.float32))])
    assert os.listdir(tmp_path) == []


def test_the_same_content_has_the_same_bytes(tmp_path, manifest):
    for name in ("a", "b"):
        write_plan(tmp_path / name, manifest, [PlanTensor.from_array("x", ARRAYS["weights/a"])])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -64])
def test_a_truncated_plan_is_refused_in_words(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(PlanCorruptError, match=r"truncated|not an engine\.plan"):
        Plan.open(path)


def test_a_longer_plan_is_refused(path):
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(PlanCorruptError, match="longer than its header says"):
        Plan.open(path)


def test_a_flipped_weight_byte_is_found_by_name(path):
    offset = Plan.open(path).spec("weights/a").offset
    data = bytearray(path.read_bytes())
    data[offset + 5] ^= 1
    path.write_bytes(data)
    Plan.open(path)
    with pytest.raises(PlanCorruptError, match="'weights/a' does not match its SHA-256"):
        Plan.open(path, verify=True)


def test_verification_may_begin_early_and_is_judged_by_verify(path):
    sound = Plan.open(path)
    sound.begin_verification()
    sound.begin_verification()
    sound.verify()
    sound.verify()
    data = bytearray(path.read_bytes())
    data[sound.spec("weights/odd").offset] ^= 1
    path.write_bytes(data)
    damaged = Plan.open(path)
    damaged.begin_verification()
    for _ in range(2):
        with pytest.raises(PlanCorruptError, match="'weights/odd' does not match its SHA-256"):
            damaged.verify()
    damaged.close()


def test_another_format_version_is_refused_in_words(path):
    data = path.read_bytes().replace(b'"optimc.format_version":"1"', b'"optimc.format_version":"9"')
    path.write_bytes(data)
    with pytest.raises(PlanVersionError, match=f"plan format 9, this optimc reads format {FORMAT_VERSION}; rebuild"):
        Plan.open(path)


def test_other_files_are_refused_in_words(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"hello, I am a text file, not a plan")
    with pytest.raises(PlanCorruptError, match="not an engine.plan"):
        Plan.open(path)
    header = json.dumps({"__metadata__": {}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PlanCorruptError, match="a safetensors file, but not an engine.plan"):
        Plan.open(path)
    with pytest.raises(PlanError, match="No such file"):
        Plan.open(tmp_path / "absent")
    with pytest.raises(PlanError, match="directory"):
        Plan.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["weights/a"].update(shape=[3, 5]), "byte range does not fit"),
        (lambda h: h["weights/a"].update(shape=[-3, -4]), "byte range does not fit"),
        (lambda h: h["weights/a"].update(dtype="Q7"), "damaged"),
        (lambda h: h["weights/a"].pop("shape"), "damaged"),
        (lambda h: h["weights/a"].update(data_offsets=[8, 56]), "starts at byte"),
        (lambda h: h.pop("weights/odd"), "starts at byte|disagree"),
        (lambda h: h["__metadata__"].update({"optimc.manifest": "{}"}), "manifest is damaged"),
        (lambda h: h["__metadata__"].pop("optimc.manifest"), "manifest is damaged"),
    ],
)
def test_a_damaged_header_is_refused_in_words(path, change, message):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(PlanCorruptError, match=message):
        Plan.open(path)


def test_content_hash_follows_the_bytes_not_the_manifest(tmp_path, manifest):
    a, b = ARRAYS["weights/a"], ARRAYS["weights/a"] + 1
    write_plan(tmp_path / "a", manifest, [PlanTensor.from_array("x", a)])
    write_plan(tmp_path / "b", manifest.model_copy(update={"name": "other"}), [PlanTensor.from_array("x", a)])
    write_plan(tmp_path / "c", manifest, [PlanTensor.from_array("x", b)])
    hashes = [Plan.open(tmp_path / name).content_hash for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]


def test_recorded_quality_is_in_the_plan_and_changes_nothing_else(path):
    with Plan.open(path) as plan:
        before = plan.content_hash
    quality = Quality(perplexity=16.0, reference_perplexity=15.0, kl_mean=0.1, top1_agreement=0.9, tokens=511)
    record_quality(path, quality)
    with Plan.open(path, verify=True) as plan:
        assert plan.manifest.quality == quality
        assert plan.content_hash == before
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(plan.tensor(name), array)
    assert os.listdir(path.parent) == ["engine.plan"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, manifest):
    left = tmp_path / ".e.plan.abcdefgh.tmp"
    left.write_bytes(b"half a plan")
    other = tmp_path / ".other.plan.abcdefgh.tmp"
    other.write_bytes(b"half of another plan")
    write_plan(tmp_path / "e.plan", manifest, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "e.plan"]


def test_a_writer_at_work_keeps_its_file(tmp_path, manifest):
    def write_again():
        write_plan(tmp_path / "e.plan", manifest, [])
        return np.zeros(3, np.uint8)

    write_plan(tmp_path / "e.plan", manifest, [PlanTensor("outer", "U8", (3,), write_again)])
    assert [path.name for path in tmp_path.iterdir()] == ["e.plan"]
    assert "outer" in Plan.open(tmp_path / "e.plan")


def test_a_refusal_of_the_system_is_said_in_words(tmp_path, manifest, monkeypatch):
    def full(_file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"the plan cannot be written to .*e\.plan: No space left on device"):
        write_plan(tmp_path / "e.plan", manifest, [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the plan cannot be written"):
        write_plan(tmp_path / "file" / "e.plan", manifest, [])


def test_a_name_as_long_as_the_file_system_allows_is_fine(tmp_path, manifest):
    write_plan(tmp_path / ("x" * 255), manifest, [])


def test_only_plans_and_empty_files_look_like_one(tmp_path, manifest):
    write_plan(tmp_path / "e.plan", manifest, [])
    (tmp_path / "empty").touch()
    (tmp_path / "notes.txt").write_text("not to be lost")
    names = ("e.plan", "empty", "notes.txt", "absent", ".")
    assert [looks_like_a_plan(tmp_path / name) for name in names] == [True, True, False, False, False]
    assert not looks_like_a_plan(Path(os.devnull))
