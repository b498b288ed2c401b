"""`optimc serve` as a process: in an environment without the compiler's packages, answered by the official client."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

import optimc_runtime.server
from optimc.cli.app import app
from optimc.errors import ConfigError

BLOCKER = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    names = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "safetensors", "optimc_passes", "gguf"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
from optimc.cli import main
main()
"""


@contextmanager
def serving(plan, *options, env=None):
    """Run a server process that cannot import what only the compiler needs; yield it and its address."""
    command = [sys.executable, "-c", BLOCKER, "serve", str(plan), "--port", "0", *map(str, options)]
    environment = {**os.environ, **(env or {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            for line in process.stdout:
                if " ready on " in line:
                    yield process, line.split(" ready on ")[1].strip()
                    break
            else:
                pytest.fail(process.stderr.read())
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(fp32_plan):
    with serving(fp32_plan) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server[1]}/v1", api_key="unused", max_retries=0, timeout=60)


def test_the_official_client_streams_what_it_gets_whole(client):
    messages = [{"role": "user", "content": "what is the capital of the country"}]
    model = client.models.list().data[0].id
    assert model == "fp32"
    ask = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_completions_take_text_and_ids(client):
    text = client.completions.create(model="fp32", prompt="the book", temperature=0, max_tokens=8)
    assert text.usage.prompt_tokens > 0
    ids = client.completions.create(model="fp32", prompt=[5, 6, 7], temperature=0, max_tokens=8, n=2)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage.prompt_tokens == 3


def test_a_request_longer_than_the_limit_is_400(client):
    with pytest.raises(openai.BadRequestError, match="256"):
        client.completions.create(model="fp32", prompt=[5] * 300, max_tokens=1)


def test_a_body_of_100_mb_is_413_and_the_server_lives_on(server, client):
    with httpx.Client(timeout=60) as http:
        response = http.post(f"{server[1]}/v1/completions", content=b" " * 100_000_000)
    assert response.status_code == 413
    assert response.json()["error"]["type"]
    assert client.completions.create(model="fp32", prompt=[5], max_tokens=1, temperature=0).choices


def test_health_and_metrics_answer(server):
    assert httpx.get(f"{server[1]}/health").status_code == 200
    metrics = httpx.get(f"{server[1]}/metrics").text
    assert "optimc_" in metrics


def test_sigterm_ends_the_process_cleanly(server):
    process, _ = server
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=40) == 0


TEXT = "what is the capital of the country and who wrote the book about it " * 6


def test_keys_pins_and_the_log_of_a_whole_life(fp32_plan, tmp_path):
    keys, text, messages = tmp_path / "keys", tmp_path / "text.txt", tmp_path / "messages.json"
    keys.write_text("alice:0123456789abcdef\n")
    keys.chmod(0o644)
    text.write_text(TEXT)
    messages.write_text(json.dumps([{"role": "system", "content": TEXT}]))
    pins = ("--pin-prefix", text, "--pin-prefix", messages)
    with serving(fp32_plan, "--api-key-file", keys, "--log-format", "json", *pins) as (process, url):
        with httpx.Client(base_url=url, timeout=60) as http:
            assert http.get("/health/ready").status_code == 200
            assert http.get("/v1/models").status_code == 401
            http.headers["Authorization"] = "Bearer 0123456789abcdef"
            cached = [
                http.post(path, json={**ask, "max_tokens": 4}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for path, ask in (
                    ("/v1/completions", {"prompt": TEXT + "who"}),
                    ("/v1/chat/completions", {"messages": [*json.loads(messages.read_text()), user("who")]}),
                    ("/v1/completions", {"prompt": "who"}),
                )
            ]
            figures = http.get("/metrics").text.splitlines()
        [pinned] = [float(line.split()[1]) for line in figures if line.startswith("optimc_prefix_cache_pinned_blocks ")]
        # What follows a prefix may change its last token, and a block is cached as a whole.
        assert cached[0] > 0
        assert cached[1] > 0
        assert cached[2] == 0
        assert pinned > 1
        assert 'optimc_tenant_tokens_total{kind="output",tenant="alice"} 12.0' in figures
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert "can be read by others (mode 0644)" in lines[0]["message"]
    requests = [line for line in lines if line.get("event") == "request"]
    assert [line["status"] for line in requests] == [401, 200, 200, 200]
    assert [line["cached_tokens"] for line in requests[1:]] == cached
    assert all(line["key"] == "alice" and line["decode_s"] > 0 for line in requests[1:])
    assert "0123456789abcdef" not in errors
    assert "capital" not in errors


def user(content):
    return {"role": "user", "content": content}


def test_a_key_of_the_environment_opens_and_text_logs_are_words(fp32_plan):
    env = {"OPTIMC_API_KEYS": "0123456789abcdef"}
    with serving(fp32_plan, "--host", "0.0.0.0", "--log-format", "text", "--no-page", env=env) as (process, url):
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer 0123456789abcdef"}).status_code == 200
        assert httpx.get(f"{url}/").status_code == 404
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert " INFO optimc.requests: request request_id=" in errors
    assert " key=key1 status=200 " in errors


@pytest.fixture
def refusal(fp32_plan, monkeypatch):
    """Call the command in this process, where a start costs less, and return why it did not get as far as serving."""

    def refused(options):
        with pytest.raises(ConfigError) as caught:
            app(["serve", str(fp32_plan), "--port", "0", *options], standalone_mode=False)
        return str(caught.value)

    monkeypatch.setattr(optimc_runtime.server, "serve", lambda *_arguments, **_options: None)
    return refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 is reachable from outside and there is no API key"),
        (["--api-key-file", "no-such-file"], "--api-key-file: no-such-file: No such file"),
        (["--cors-origin", "example.org"], "--cors-origin: 'example.org' is no origin"),
        (["--pin-prefix", "no-such-file"], "--pin-prefix: no-such-file: No such file"),
        (["--log-format", "xml"], "--log-format: must be json or text"),
        (["--policy", "lifo"], "policy: must be one of fcfs, shortest-prompt, priority"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_is_served(refusal, options, words):
    assert words in refusal(options)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "Expecting property name"),
        ("a.json", "3", "neither a list of messages nor an object"),
        ("a.json", '[{"role": "system"}]', "content"),
        ("a.json", '{"messages": [{"role": "system", "content": "a"}], "temperatur": 1}', "temperatur"),
        ("a.txt", "a", "only whole blocks"),
        ("prompt", "", "the prompt is empty"),
        ("a.txt", TEXT * 20, "tokens"),
    ],
)
def test_a_prefix_that_cannot_be_pinned_is_said(refusal, tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    said = refusal(["--pin-prefix", str(path)])
    assert words in said
    assert f"--pin-prefix: {path}: " in said


def test_a_damaged_plan_never_opens_the_port(fp32_plan, tmp_path):
    damaged = tmp_path / "damaged.plan"
    data = bytearray(fp32_plan.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answered = threading.Event()
    ended = threading.Event()

    def knock():
        while not ended.wait(0.005):
            with socket.socket() as door:
                if door.connect_ex(("127.0.0.1", port)) == 0:
                    answered.set()

    knocking = threading.Thread(target=knock)
    knocking.start()
    result = subprocess.run(
        [sys.executable, "-m", "optimc", "serve", str(damaged), "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    ended.set()
    knocking.join()
    assert result.returncode == 2, result.stderr
    assert "SHA-256" in result.stderr
    assert not answered.is_set()
