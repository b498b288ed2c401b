"""A folder holds the phases of one build, and what else lies there stays."""

import pytest

from optimc.errors import StorageError
from optimc_passes.graph.dump import GraphDump


@pytest.fixture
def dump(tiny_decoder):
    model = tiny_decoder(layers=1).model

    def dump(folder, *phases):
        graphs = GraphDump(folder)
        for phase in phases:
            graphs.add(phase, model)
        return {path.name for path in folder.iterdir()}

    return dump


def named(*stems):
    return {f"{stem}.{ending}" for stem in stems for ending in ("txt", "onnx")}


def test_a_shorter_build_leaves_no_phase_of_the_longer_one_before_it(dump, tmp_path):
    assert dump(tmp_path, "exported", "swiglu", "geglu") == named("00-exported", "01-swiglu", "02-geglu")
    (tmp_path / "program.txt").write_text("what the first build became")
    assert dump(tmp_path, "exported", "geglu") == named("00-exported", "01-geglu")


def test_an_export_from_the_cache_leaves_no_export_of_an_earlier_build(dump, tmp_path):
    dump(tmp_path, "exported")
    for _ in range(2):
        GraphDump(tmp_path).skip_export("exported")
        assert [path.name for path in tmp_path.iterdir()] == ["00-exported.txt"]


def test_what_somebody_else_left_stays(dump, tmp_path):
    others = {"01-notes.txt": "tiny: 3 ideas, one bad", "notes.txt": "g: 4 nodes, onnx 23", "program.txt": "mine"}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "02-bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "03-folder.txt").mkdir()
    left = dump(tmp_path, "exported")
    assert left == named("00-exported") | {*others, "02-bytes.txt", "03-folder.txt"}
    assert {name: (tmp_path / name).read_text() for name in others} == others


def test_a_folder_in_the_way_is_named(dump, tmp_path):
    (tmp_path / "00-exported.txt").mkdir()
    with pytest.raises(StorageError, match=f"the graph cannot be written to {tmp_path}"):
        dump(tmp_path, "exported")
