"""A build in a process of its own tells why it failed, and does not outlive whoever started it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from optimc.measure.compare.build_jobs import BuildJob
from optimc.measure.compare.child_build import ChildBuild

pytestmark = pytest.mark.slow  # each starts an interpreter

MODULE = "optimc.measure.compare.child_build"


def test_a_failing_build_is_quoted(tmp_path):
    build = ChildBuild(BuildJob("a", tmp_path / "no.yaml", tmp_path / "a.plan", 1, "a"), [])
    assert build._process.wait(60) == 2
    assert build.poll() == 2
    assert "no.yaml" in build.last_words()
    build.stop()


def test_reading_what_it_says_never_moves_the_place_where_it_writes(tmp_path, monkeypatch):
    # Both have one place in the file: a read that begins by seeking back would let the child write there.
    class Unmoved:
        def __init__(self, file):
            self.fileno, self.close = file.fileno, file.close

    whole_file = tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: Unmoved(whole_file()))
    build = ChildBuild(BuildJob("a", tmp_path / "no.yaml", tmp_path / "a.plan", 1, "a"), [])
    build._process.wait(60)
    assert build.news() == []
    assert "no.yaml" in build.last_words()
    build.stop()


def test_it_ends_when_its_parent_does(tmp_path):
    # `serve` would run for good; the pipe is what a parent that dies leaves closed.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", MODULE, "build", str(fifo)]  # reading the recipe never ends
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child.stdin.close()
    assert child.wait(60) == 1


def test_a_command_that_is_done_ends_though_its_parent_lives():
    command = [sys.executable, "-m", MODULE, "--help"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=Path.cwd())
    assert child.wait(60) == 0
    child.stdin.close()
