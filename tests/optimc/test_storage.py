"""A file is there whole or as it was before, with the permissions and at the place that `open` would have given it."""

import fcntl
import os
from pathlib import Path

import pytest

from optimc.errors import StorageError
from optimc.storage import replacing, write_whole


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_is_as_readable_as_any_other(tmp_path):
    write_whole("the report", tmp_path / "new" / "report.json", "ü")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "new" / "report.json").read_text("utf-8") == "ü"
    assert (tmp_path / "new" / "report.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    path = tmp_path / "secret"
    path.write_text("earlier")
    path.chmod(0o600)
    write_whole("the report", path, "later")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("later", 0o600)


def test_a_link_stays_one_and_its_target_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "real")
    write_whole("the report", link, "x")
    assert link.is_symlink()
    assert (tmp_path / "disk" / "real").read_text() == "x"


def test_a_block_that_fails_leaves_the_earlier_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")

    def write_half():
        with replacing(path) as file:
            file.write(b"half")
            raise RuntimeError("on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        write_half()
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "earlier"


def test_a_refusal_of_the_system_is_said_in_words(tmp_path, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match=r"the report cannot be written to .*file: No space left on device"):
        write_whole("the report", tmp_path / "file", "x")
    assert names(tmp_path) == []


def test_only_what_must_outlive_a_power_cut_waits_for_the_disk(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    with replacing(tmp_path / "a"):
        pass
    assert waited == []
    with replacing(tmp_path / "b", durable=True):
        pass
    assert len(waited) == 1


def test_what_a_killed_writer_left_is_removed_by_the_next_and_nothing_else_is(tmp_path):
    others = [".file.backup-of-mine.tmp", ".file.tmp", ".file.b.abcdefgh.tmp", ".other.abcdefgh.tmp"]
    for name in (".file.abcdefgh.tmp", *others):
        (tmp_path / name).write_text("half")
    write_whole("the report", tmp_path / "file", "x")
    assert names(tmp_path) == sorted([*others, "file"])


def test_a_writer_at_work_keeps_its_file(tmp_path):
    left = tmp_path / ".file.abcdefgh.tmp"
    left.write_text("half")
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write_whole("the report", tmp_path / "file", "x")
    assert names(tmp_path) == [left.name, "file"]


def test_a_folder_that_may_be_written_and_not_listed_will_do(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    write_whole("the report", tmp_path / "file", "x")
    assert (tmp_path / "file").read_text() == "x"


def test_a_name_as_long_as_the_file_system_allows_is_fine(tmp_path):
    write_whole("the report", tmp_path / ("x" * 255), "x")
