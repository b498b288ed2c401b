from pathlib import Path

import pytest

from optimc.errors import CheckpointError
from optimc_passes.load.source import FolderSource, GgufSource, HubSource, find_source


def test_a_folder_is_taken_as_a_folder(tmp_path):
    assert find_source(tmp_path, None) == FolderSource(tmp_path)


def test_a_gguf_file_is_known_by_its_suffix(tmp_path):
    path = tmp_path / "model.GGUF"
    path.touch()
    assert find_source(str(path), None) == GgufSource(path)


def test_what_is_not_on_disk_is_a_hub_id():
    assert find_source("org/name-1.0_x", "v1") == HubSource("org/name-1.0_x", "v1")


def test_a_folder_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    assert find_source("org/name", None) == FolderSource(Path("org/name"))


@pytest.mark.parametrize("model", ["nowhere", "a/b/c", "models/absent.gguf", Path("org/name"), "/no/such/folder"])
def test_what_is_neither_is_refused(model, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such file or folder, and not a hub id"):
        find_source(model, None)


def test_another_kind_of_file_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="not this kind of file"):
        find_source(tmp_path / "model.bin", None)


def test_a_revision_of_something_on_disk_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no revision 'v1' to pick"):
        find_source(tmp_path, "v1")
