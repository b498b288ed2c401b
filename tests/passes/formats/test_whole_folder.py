"""A folder is complete or not there, and places it cannot take are told before any work."""

import subprocess
import sys
from pathlib import Path

import pytest

from optimc.errors import StorageError
from optimc_passes.formats.whole_folder import whole_folder, why_not_replaceable

LEAVES_A_HALF = """
import os, sys
from pathlib import Path
from optimc_passes.formats.whole_folder import whole_folder
with whole_folder("it", Path(sys.argv[1])) as partial:
    (partial / "half").write_text("x")
    os._exit(9)
"""


def fill(folder: Path) -> None:
    with whole_folder("it", folder) as partial:
        (partial / "file").write_text("x")
        assert partial.parent == folder.resolve().parent


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_takes_the_place_of_nothing_and_of_an_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("new", "empty", "deep/er"):
        assert why_not_replaceable(tmp_path / name) is None
        fill(tmp_path / name)
        assert why_not_replaceable(tmp_path / name) is not None
    assert contents(tmp_path) == ["deep", "deep/er", "deep/er/file", "empty", "empty/file", "new", "new/file"]


def test_a_failure_leaves_nothing(tmp_path):
    def fail() -> None:
        with whole_folder("it", tmp_path / "out") as partial:
            (partial / "half").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert contents(tmp_path) == []


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert why_not_replaceable(tmp_path / "link") is None
    fill(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "file").is_file()


def test_names_that_end_in_dots_or_begin_with_a_tilde_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "up").mkdir()
    fill(Path("up/x/.."))
    assert contents(tmp_path) == ["up", "up/file"]
    with whole_folder("it", Path("~/out")) as partial:
        assert partial.is_absolute()


def test_a_name_as_long_as_the_file_system_allows(tmp_path):
    fill(tmp_path / ("x" * 255))
    with pytest.raises(StorageError, match="name too long"):
        fill(tmp_path / ("x" * 256))


def test_places_that_cannot_be_taken_are_told_without_trying(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    assert "is not an empty folder" in why_not_replaceable(tmp_path / "file")
    assert "is not an empty folder" in why_not_replaceable(tmp_path / "full")
    assert "is not a folder" in why_not_replaceable(tmp_path / "file" / "x")
    monkeypatch.chdir(tmp_path / "full")
    (tmp_path / "full" / "file").unlink()
    assert "is the working directory" in why_not_replaceable(Path())
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "full")
    assert "is a mount point" in why_not_replaceable(tmp_path / "full")


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", LEAVES_A_HALF, str(tmp_path / "out")], check=False)
        assert killed.returncode == 9
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".out-")
    with whole_folder("it", tmp_path / "out") as living:
        (living / "file").write_text("x")
        assert not left.exists()
        fill(tmp_path / "out")
        assert living.exists()
        (tmp_path / "out" / "file").unlink()
    assert contents(tmp_path) == ["out", "out/file"]


def test_what_came_into_the_place_meanwhile_stays(tmp_path):
    def fill_late() -> None:
        with whole_folder("it", tmp_path / "out"):
            fill(tmp_path / "out")

    with pytest.raises(StorageError, match="not empty"):
        fill_late()
    assert contents(tmp_path) == ["out", "out/file"]
