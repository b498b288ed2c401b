"""From the options of `optimc bench` to a load."""

import hashlib

import pytest
from typer.testing import CliRunner

from optimc.cli import app as command_line
from optimc.cli.load_options import make_workload, parse_rates, read_dataset
from optimc.errors import ConfigError
from optimc.measure.load.slo import Slo

NOTHING = {
    "concurrency": None, "rate": None, "arrival": None, "dataset_file": None, "turns": 1, "slo": None,
    "is_ladder": False,
}  # fmt: skip


def load(**options):
    return make_workload(**{**NOTHING, **options})


def test_without_a_rate_the_loop_is_closed():
    assert (load().arrival, load().concurrency, load(concurrency=4).concurrency) == ("closed", 1, 4)


def test_a_rate_opens_the_loop():
    assert (load(rate=4.0).arrival, load(rate=4.0, arrival="constant").arrival) == ("poisson", "constant")


def test_turns_make_conversations():
    assert (load(turns=3).dataset, load(turns=3).turns) == ("turns", 3)


def test_a_file_is_named_and_known_by_its_content(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "Once", "at_s": 3}\n')
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file, trace = load(dataset_file=path), load(dataset_file=path, arrival="trace")
    assert (file.dataset, file.prompts, file.dataset_digest) == ("file", "some.jsonl", digest)
    assert (trace.dataset, trace.arrival) == ("trace", "trace")
    assert read_dataset(path, trace, None).moments == [3.0]


def test_limits_are_read():
    assert load(slo=["ttft=500", "tpot=40"]).slo == Slo(ttft_ms=500, tpot_ms=40)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"rate": 4.0, "concurrency": 2}, ["--rate"]),
        ({"arrival": "trace"}, ["--arrival"]),
        ({"arrival": "closed"}, ["--arrival"]),
        ({"arrival": "poisson"}, ["--rate"]),
        ({"duration_s": 3.0}, ["--duration"]),
        ({"is_ladder": True, "rate": 4.0, "concurrency": 2}, ["--rate", "--rate", "--concurrency"]),
        ({"rate": 4.0, "concurrency": 2, "slo": ["ttft"]}, ["--rate", "--slo"]),
        ({"prompt_tokens": 0}, ["--prompt-tokens"]),
    ],
)
def test_what_does_not_go_together_is_named_by_its_options(options, where):
    with pytest.raises(ConfigError) as caught:
        load(**options)
    assert [fault.where for fault in caught.value.faults] == where


def test_rates_are_numbers_with_commas():
    assert parse_rates("1,2,4.5") == [1, 2, 4.5]
    assert parse_rates(None) is None
    with pytest.raises(ConfigError, match="--rates"):
        parse_rates("1;2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--slo ttft=500 --slo itl=4", "'itl=4' is not a limit"),
        ("--ladder", "--ladder: needs --slo"),
        ("--ladder --slo ttft=500 --attain 2", "--attain: must be a share"),
        ("--rate 4 --concurrency 2", "give one of them"),
        ("--rates 1,2", "--rates: needs --ladder"),
        ("--repeats 0", "--repeats: must be at least 1"),
        ("--server-pid 999999999 --rate 1", "there is no process 999999999"),
        ("--dataset absent.jsonl", "absent.jsonl"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(words, message):
    result = CliRunner().invoke(command_line.app, ["bench", "--url", "http://127.0.0.1:1", *words.split()])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_the_help_shows_every_load_option():
    text = CliRunner().invoke(command_line.app, ["bench", "--help"]).output
    for option in ("--rate", "--arrival", "--duration", "--dataset", "--turns", "--slo", "--ladder", "--attain"):
        assert option in text
