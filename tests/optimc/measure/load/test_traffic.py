"""Files of requests: every form that is read, and every fault that is named."""

import json
import os
import threading

import pytest

from optimc.errors import ConfigError
from optimc.measure.load.traffic import read_traffic, traffic_digest
from optimc.measure.prompts import ChatPrompt


@pytest.fixture
def read(tmp_path):
    def lines(*rows):
        path = tmp_path / "traffic.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return list(read_traffic(path))

    return lines


HELLO = [{"role": "user", "content": "Hi"}]


def test_prompts_are_read_line_by_line(read):
    one, other = read({"prompt": "Once", "kind": "prose"}, "", {"messages": HELLO})
    assert (one.number, one.kind, one.prompt) == (1, "prose", "Once")
    assert (other.number, other.kind, other.messages) == (3, "", tuple(HELLO))


def test_our_own_log_is_read_with_all_its_fields(read):
    row = {
        "format": 1, "at_s": 12.345, "request_id": "r1", "tenant": "a", "endpoint": "chat", "messages": HELLO,
        "tools": [{"type": "function"}], "prompt_ids": [1, 2], "prompt_tokens": 2, "cached_tokens": 0,
        "output_tokens": 7, "ttft_s": 0.1, "max_tokens": 16,
    }  # fmt: skip
    (line,) = read(row)
    assert (line.at_s, line.tenant, line.endpoint, line.prompt_ids) == (12.345, "a", "chat", (1, 2))
    assert (line.cached_tokens, line.output_tokens, line.max_tokens) == (0, 7, 16)
    assert line.as_prompt() == ChatPrompt(tuple(HELLO), ({"type": "function"},))
    assert line.encode(None, None) == [1, 2]


def test_null_is_the_same_as_not_said(read):
    assert read({"prompt": "Once", "tenant": None, "ttft_s": None})[0].tenant is None


def test_a_mooncake_trace_is_read_by_its_own_names(read):
    (line,) = read({"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2]})
    assert (line.at_s, line.prompt_tokens, line.output_tokens) == (27.482, 6955, 52)
    assert line.hash_ids == (46, 47, 2)
    assert not line.has_text


def test_an_openai_batch_is_read_and_what_is_no_load_passed_over(read):
    body = {"model": "m", "messages": HELLO, "max_completion_tokens": 9, "temperature": 1}
    (line,) = read({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert (line.request_id, line.endpoint, line.max_tokens, line.messages) == ("c", "chat", 9, tuple(HELLO))


def test_lines_that_are_no_requests_are_all_named(tmp_path):
    path = tmp_path / "traffic.jsonl"
    lines = [
        '{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}',
        "{}",
        '{"prompt": 3}',
        '{"prompt": ""}',
        "no JSON",
        '{"messages": [{}]}',
        '{"prompt": "a", "at": 3, "when": 4}',
        '{"prompt": "a", "at_s": -1}',
        '{"prompt": "a", "at_s": 1, "timestamp": 1}',
        '{"prompt": "a", "hash_ids": [1]}',
        '{"format": 2, "prompt": "a"}',
        '{"custom_id": "c", "url": "/v1/embeddings", "body": {}}',
        "[]",
    ]
    path.write_text("\n".join(['{"prompt": "good"}', *lines]))
    with pytest.raises(ConfigError) as caught:
        list(read_traffic(path))
    assert [fault.where for fault in caught.value.faults] == [f"{path}:{line + 2}" for line in range(len(lines))]
    assert "unknown fields 'at', 'when'" in str(caught.value)


def test_no_more_than_twenty_faults_are_named(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("{}\n" * 100)
    with pytest.raises(ConfigError) as caught:
        list(read_traffic(path))
    assert len(caught.value.faults) == 20


def test_an_empty_or_absent_file_is_refused(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no request"):
        list(read_traffic(path))
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        list(read_traffic(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        traffic_digest(tmp_path / "absent.jsonl")


def test_what_can_be_read_only_once_is_refused_as_a_dataset_and_read_as_traffic(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe: can be read only once, .*; save it to a file"):
        traffic_digest(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "Once"}',))
    writer.start()
    assert [line.prompt for line in read_traffic(pipe)] == ["Once"]
    writer.join()


def test_text_without_tokenizer_and_messages_without_template_are_refused(read):
    text, chat = read({"prompt": "Once"}, {"messages": HELLO})
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        text.encode(None, None)
    with pytest.raises(ConfigError, match="no chat template"):
        chat.encode(object(), None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"prompt": "caf\xe9"}', "is not UTF-8: byte 0xe9 at column 16"),
        (b'{"prompt": "a\\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"prompt": "a", "at_s": 1' + b"0" * 400 + b"}", '"at_s" must be a number'),
        (b'{"prompt": "a", "at_s": NaN}', '"at_s" must be a number'),
        (b'{"prompt": "a", "at_s": Infinity}', '"at_s" must be a number'),
        (b'{"prompt_tokens": 1000000000000}', '"prompt_tokens" must be a whole number'),
        (b'{"prompt": "a", "max_tokens": -1}', '"max_tokens" must be a whole number'),
        (b'{"prompt": [1, 9999999999]}', '"prompt" must be a whole number'),
    ],
)
def test_a_line_nothing_can_be_made_of_is_named_and_those_around_it_are_read(tmp_path, line, told):
    path = tmp_path / "traffic.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b'\n{"prompt": "good too"}\n')
    found = []
    with pytest.raises(ConfigError) as caught:
        found.extend(read_traffic(path))
    (fault,) = caught.value.faults
    assert fault.where == f"{path}:2"
    assert told in fault.message


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "traffic.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "good"}\r\n')
    assert [line.prompt for line in read_traffic(path)] == ["good"]


def test_hashes_may_be_of_any_size(read):
    assert read({"input_length": 9, "hash_ids": [2**64, -5]})[0].hash_ids == (2**64, -5)
