"""`optimc bench`: what its help promises."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.cli.bench import bench
from optimc.errors import ConfigError, MeasureError
from optimc.measure.bench_result import DEFINITIONS
from optimc.plan import Plan


def test_the_help_means_by_each_figure_what_the_report_means():
    text = " ".join((bench.__doc__ or "").split())
    missing = [name for name, meaning in DEFINITIONS.items() if f": {meaning}" not in text]
    assert missing == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "ngram"}, "--speculation: needs a PLAN, not --url"),
        ({"no_speculation": True}, "--no-speculation: needs a PLAN, not --url"),
    ],
)
def test_what_needs_a_plan_is_refused_with_a_url(options, message):
    with pytest.raises(ConfigError, match=message):
        bench(url="http://127.0.0.1:1", **options)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["a.plan", "--model", "m", "--chat"], {"--model", "--chat"}),
        (["--url", "http://h", "--max-seqs", "2", "--threads", "1"], {"--max-seqs", "--threads"}),
        (["--url", "http://h", "--no-prefix-cache", "--trust"], {"--prefix-cache", "--trust"}),
        (["--url", "http://h", "--no-bound"], {"--no-bound"}),
        (["a.plan", "--attain", "0.5"], {"--attain"}),
        (["a.plan", "--turn-tokens", "9"], {"--turn-tokens"}),
        (["a.plan", "--dataset", __file__, "--prompt-tokens", "9", "--output-spread", "0.1"],
         {"--prompt-tokens", "--output-spread"}),
    ],
)  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(words, refused):
    error = CliRunner().invoke(app, ["bench", *words]).exception
    assert isinstance(error, ConfigError)
    assert {fault.where for fault in error.faults} == refused


def test_a_key_in_the_environment_is_nobodys_option(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    error = CliRunner().invoke(app, ["bench", "absent.plan", "--no-bound"]).exception
    assert "absent.plan" in str(error)
    assert "--api-key" not in str(error)


def test_a_report_that_could_not_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="--output: .* is a folder"):
        bench(url="http://127.0.0.1:1", output=tmp_path)


def test_a_plan_is_opened_once_for_bound_engine_and_template(plan, monkeypatch):
    opened, really_open = [], Plan.open

    def opening(path, **options):
        opened.append(path)
        return really_open(path, **options)

    def load_engine(given, **options):
        assert isinstance(given, Plan)
        return SimpleNamespace(max_seqs=1, close=lambda: None)

    def run_bench(engine, workload, **options):
        raise MeasureError("so far, so good")

    monkeypatch.setattr(Plan, "open", opening)
    monkeypatch.setattr("optimc.cli.engine_options.load_engine", load_engine)
    monkeypatch.setattr("optimc.measure.roofline.rates_store.try_rates", lambda cache, threads: None)
    monkeypatch.setattr("optimc.measure.bench.run_bench", run_bench)
    path = plan("a.plan")
    with pytest.raises(MeasureError, match="so far"):
        bench(path)
    assert opened == [path]
