"""Results are written whole or not at all, and what could not be written is said before the work."""

import os
from pathlib import Path

import pytest

from optimc.cli.output_file import check_output, write_output
from optimc.errors import ConfigError, StorageError


def test_folders_are_made_and_the_file_is_as_readable_as_any_other(tmp_path):
    path = tmp_path / "new" / "folder" / "report.json"
    check_output(path, "--output")
    write_output("the report", path, "ü")
    plain = tmp_path / "plain"
    plain.write_text("x")
    assert path.read_text("utf-8") == "ü"
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_folder_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="--html: .* is a folder; name a file"):
        check_output(tmp_path, "--html")


def test_what_fails_half_way_leaves_the_earlier_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text("earlier")

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        write_output("the report", path, "later")
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "earlier"


def test_a_device_is_written_to_and_a_link_stays_a_link(tmp_path):
    write_output("the report", Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    write_output("the report", link, "x")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_text() == "x"
