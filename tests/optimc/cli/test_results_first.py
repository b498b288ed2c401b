"""Hours of results are shown before a file is written that may fail."""

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.errors import StorageError


class Result:
    """Whatever a command has measured."""

    ok = True
    best = SimpleNamespace()

    def to_json(self):
        return {"measured": "for hours"}


@pytest.mark.parametrize(
    ("module", "command", "writer"),
    [
        ("attribute", "attribute RECIPE --json --html page.html", "_write_page"),
        ("search", "search RECIPE --json --write-recipe best.yaml", "_write_recipe"),
    ],
)
def test_what_was_measured_is_printed_though_the_file_cannot_be_written(module, command, writer, monkeypatch, tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("name: tiny\nmodel: somewhere/tiny\npasses: [{rtn: {bits: 4, group_size: 32}}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"optimc.cli.{module}._run", lambda *_args, **_options: Result())
    _fails(monkeypatch, f"optimc.cli.{module}.{writer}")
    _printed_though_it_fails(command.replace("RECIPE", str(recipe)))


def test_a_comparison_is_printed_though_its_report_cannot_be_written(monkeypatch, tmp_path, plan):
    monkeypatch.chdir(tmp_path)
    module = import_module("optimc.measure.compare.compare_plans")  # the package's `compare` is the function
    monkeypatch.setattr(module, "compare", lambda *_args, **_options: Result())
    _fails(monkeypatch, "optimc.cli.compare._write_html")
    _printed_though_it_fails(f"compare {plan('a.plan')} --no-bound --json --html page.html")


def _fails(monkeypatch, name):
    def write(*_args):
        raise StorageError("no room")

    monkeypatch.setattr(name, write)


def _printed_though_it_fails(command):
    result = CliRunner().invoke(app, command.split())
    assert isinstance(result.exception, StorageError), result.exception
    assert json.loads(result.stdout) == {"measured": "for hours"}
