"""`optimc prefix-report`, from the file to the exit code."""

import json

import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.errors import ConfigError

SHARED = " ".join(f"Rule {number}: answer in number {number * 7}." for number in range(40))


@pytest.fixture
def invoke():
    return lambda *args: CliRunner().invoke(app, ["prefix-report", *map(str, args)])


@pytest.fixture
def traffic_file(tmp_path):
    """Eight requests with a time in front of what they share; the last as an OpenAI batch has it."""
    path = tmp_path / "traffic.jsonl"
    bodies = [
        {
            "messages": [
                {"role": "system", "content": f"It is 12:00:{number:02}. {SHARED}"},
                {"role": "user", "content": f"{number}?"},
            ]
        }
        for number in range(8)
    ]
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **bodies[-1]}}
    path.write_text("\n".join(map(json.dumps, [*bodies[:-1], batch])) + "\n")
    return path


def test_the_killer_is_named_with_its_edit(invoke, traffic_file):
    result = invoke(traffic_file)
    assert result.exit_code == 0, result.output
    assert "timestamp in messages[0].content" in result.output
    assert "edit: move the time in messages[0].content behind the shared text" in result.output


def test_json_has_all_of_it_and_redacted_none_of_the_prompts(invoke, traffic_file):
    report = json.loads(invoke(traffic_file, "--json", "--prefill-tokens-per-s", 100, "--kv-tokens", 4096).stdout)
    (killer,) = report["killers"]
    assert (report["format"], report["requests"], killer["kind"], killer["requests"]) == (1, 8, "timestamp", 8)
    assert killer["seconds_lost"] == killer["tokens_lost"] / 100
    assert report["could_be_with_pool"]["kv_tokens"] == 4096
    assert "12:00" not in invoke(traffic_file, "--json", "--redact").stdout


def test_fail_on_killer_exits_with_1_only_if_there_is_one(invoke, traffic_file, tmp_path):
    assert invoke(traffic_file, "--fail-on-killer").exit_code == 1
    clean = tmp_path / "clean.jsonl"
    clean.write_text('{"prompt": "Hello"}\n')
    assert invoke(clean, "--fail-on-killer").exit_code == 0


def test_damaged_lines_are_refused_with_their_numbers(invoke, traffic_file):
    lines = traffic_file.read_text().splitlines()
    lines[1], lines[4] = '{"messages": 3}', "{broken"
    traffic_file.write_text("\n".join(lines))
    result = invoke(traffic_file)
    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert f"{traffic_file}:2" in message
    assert f"{traffic_file}:5" in message


def test_options_out_of_range_are_all_named(invoke, traffic_file):
    result = invoke(traffic_file, "--block-size", 0, "--kv-tokens", -1, "--prefill-tokens-per-s", "nan", "--top", 0)
    assert isinstance(result.exception, ConfigError)
    for option in ("--block-size", "--kv-tokens", "--prefill-tokens-per-s", "--top"):
        assert option in str(result.exception)
