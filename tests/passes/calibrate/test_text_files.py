import json

import pytest

from optimc.errors import CalibrationError
from optimc_passes.calibrate.text_files import read_jsonl_file, read_text_file


def test_a_text_file_is_one_text(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo ü", "utf-8")
    assert read_text_file(tmp_path / "a.txt") == ["one\n\ntwo ü"]


def test_a_jsonl_file_is_one_text_per_line(tmp_path):
    texts = ["one", "two\nlines", "line\u2028separator"]
    lines = [json.dumps({"id": 3, "body": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n", "utf-8")
    assert read_jsonl_file(tmp_path / "a.jsonl", "body") == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a list, not an object"),
        ('{"text": 3}', "line 2 has a int there as text field 'text'; its fields: text"),
        ('{"title": "x", "body": "y"}', "line 2 has no such field as text field 'text'; its fields: title, body"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(CalibrationError, match=words):
        read_jsonl_file(tmp_path / "a.jsonl", "text")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"a\.txt: No such file"):
        read_text_file(tmp_path / "a.txt")


def test_binary_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abc\xff")
    with pytest.raises(CalibrationError, match=r"a\.txt: not UTF-8 text \(byte 3\)"):
        read_text_file(tmp_path / "a.txt")
