"""What could not be written is said before the work, and devices are written to as files are."""

import os
from pathlib import Path

import pytest

from optimc.cli.output_file import check_output, write_output
from optimc.errors import ConfigError


def test_a_folder_is_refused_before_the_work(tmp_path):
    with pytest.raises(ConfigError, match="--html: .* is a folder; name a file"):
        check_output(tmp_path, "--html")


def test_a_device_is_written_to_and_folders_are_made_for_a_file(tmp_path):
    write_output("the report", Path(os.devnull), "x")
    assert not Path(os.devnull).is_file()
    path = tmp_path / "new" / "folder" / "report.json"
    check_output(path, "--output")
    write_output("the report", path, "x")
    assert path.read_text() == "x"
