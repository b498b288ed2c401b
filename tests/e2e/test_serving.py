"""`optimc serve` as a process: in an environment without the compiler's packages, answered by the official client."""

import signal
import subprocess
import sys

import httpx
import openai
import pytest

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


@pytest.fixture(scope="module")
def server(fp32_plan):
    """A server process that cannot import what only the compiler needs."""
    command = [sys.executable, "-c", BLOCKER, "serve", str(fp32_plan), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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
