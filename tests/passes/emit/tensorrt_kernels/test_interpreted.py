"""Runs `interpreted/` under Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = FOLDER.parents[4]


def run(marker: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marker, str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_equal_their_reference():
    run("not slow")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_equal_their_reference_on_the_whole_matrix():
    run("slow")
