import subprocess
import sys

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app

HEAVY = ("numpy", "pydantic", "rich", "starlette", "tokenizers", "torch", "transformers", "onnx")


def test_the_command_line_loads_nothing_heavy_before_a_command_runs():
    code = f"import sys, optimc.cli; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["serve", "chat", "bench"])
def test_commands_that_decode_say_how_tokens_are_guessed(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for option in ("--speculation", "--no-speculation", "--lossy-acceptance", "--typical-epsilon", "--typical-delta"):
        assert option in result.output


def test_no_option_is_cut_short_on_a_narrow_terminal():
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "80"})
    for option in ("--max-queued-requests", "--ignore-generation-config", "--inflight-batching"):
        assert option in result.output
