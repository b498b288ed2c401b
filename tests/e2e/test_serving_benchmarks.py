"""The serving benchmarks, a little of each, on the tiny model: what they look at is there, and good."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, plan, output, *options):
    command = [sys.executable, BENCHMARKS / f"{script}.py", plan, "--quick", "--output", output, *options]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=500)


@pytest.fixture(scope="module")
def roomy_plan(build):
    """Tools make long prompts."""
    limits = {"max_seq_len": 512, "max_step_tokens": 64, "max_seqs": 16, "kv_memory": "8MiB"}
    return build("roomy", limits=limits).path


def test_a_short_soak_leaves_nothing_behind(roomy_plan, tmp_path):
    done = run("serving_soak", roomy_plan, tmp_path / "soak.md", "--longest", 300, "--kv-memory", "1MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "soak.md").read_text()
    for errand in ("stream", "JSON by schema", "regex", "tool call", "echo and scores", "three choices"):
        assert f"| {errand} | finished |" in text


def test_a_few_hundred_hostile_requests_find_no_5xx(roomy_plan, tmp_path):
    pytest.importorskip("schemathesis", reason="optimc[fuzz] is not installed")
    done = run("serving_fuzz", roomy_plan, tmp_path / "fuzz.md")
    assert done.returncode == 0, done.stdout + done.stderr


def test_overhead_is_measured(roomy_plan, tmp_path):
    done = run("serving_overhead", roomy_plan, tmp_path / "overhead.md")
    # Whether targets are reached says nothing about the tiny model; that there are figures does.
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    text = (tmp_path / "overhead.md").read_text()
    assert text.count("tokens/s over HTTP") == 2
    assert text.count("p99") == 4
