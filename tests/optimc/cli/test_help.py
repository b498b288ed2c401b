import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.cli.commands import COMMANDS

HEAVY = ("numpy", "pydantic", "rich", "starlette", "tokenizers", "torch", "transformers", "onnx")


def test_the_command_line_loads_nothing_heavy_before_a_command_runs():
    code = f"import sys, optimc.cli; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_command_loads_no_other_one():
    code = "import sys, optimc.cli.app as cli; cli.app(['recipe-schema'], standalone_mode=False); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.splitlines()[-1].split())
    assert {f"optimc.cli.{name}" for name in ("serve", "bench", "search")}.isdisjoint(loaded)
    assert "optimc.cli.recipe_schema" in loaded


def test_help_lists_every_command_with_what_it_does():
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"})
    listed = dict(re.findall(r"^  ([a-z-]+) {2,}(\S.*)$", result.output.partition("Commands:")[2], re.MULTILINE))
    assert list(listed) == list(COMMANDS)


def test_a_misspelt_command_is_told_the_nearest():
    result = CliRunner().invoke(app, ["serv"], env={"COLUMNS": "80"})
    assert result.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'" in result.output


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
