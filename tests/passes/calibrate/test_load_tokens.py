import subprocess
import sys

import numpy as np
import pytest

from optimc.errors import CalibrationError
from optimc_passes.calibrate import CalibrationSpec, load_tokens, python_docs
from optimc_passes.calibrate import load_tokens as load_tokens_function
from optimc_passes.calibrate.token_stream import encode_texts


def spec(**changes) -> CalibrationSpec:
    return CalibrationSpec(**({"samples": 4, "seq_len": 32} | changes))


def flat(calibration) -> list[int]:
    return [token for row in calibration.tokens for token in row.tolist()]


def test_python_docs_rows(plain, plain_json):
    got = load_tokens(spec(), plain_json)
    assert [row.shape for row in got.tokens] == [(32,)] * 4
    assert all(row.dtype == np.int32 for row in got.tokens)
    assert got.tokens_used == 128
    assert got.description == "python-docs: 128 tokens in 4 rows of up to 32, seed 0"


def test_rows_are_pieces_of_the_calibration_split(plain, plain_json):
    stream = encode_texts(plain, python_docs.calibration_texts()).tolist()
    pieces = {tuple(stream[start : start + 32]) for start in range(0, len(stream), 32)}
    assert all(tuple(row.tolist()) in pieces for row in load_tokens(spec(samples=64), plain_json).tokens)


def test_the_default_request_is_met_by_the_built_in_text(plain_json):
    assert load_tokens(CalibrationSpec(), plain_json).tokens_used == 128 * 512


def test_same_seed_is_identical_and_another_is_not(plain_json):
    first, again, other = (load_tokens(spec(seed=seed), plain_json) for seed in (3, 3, 4))
    assert flat(first) == flat(again)
    assert first.digest == again.digest
    assert flat(first) != flat(other)
    assert first.digest != other.digest


def test_no_row_is_taken_twice(plain_json):
    rows = load_tokens(spec(samples=200), plain_json).tokens
    assert len({tuple(row.tolist()) for row in rows}) > 190  # tables of the text repeat themselves here and there


def test_bos_opens_every_row(with_bos, with_bos_json):
    got = load_tokens(spec(), with_bos_json)
    assert all(row[0] == 0 and 0 not in row[1:] and 1 not in row for row in got.tokens)
    assert [len(row) for row in got.tokens] == [32] * 4


def test_short_text_is_an_error_with_the_exact_count(tmp_path, plain, plain_json):
    path = tmp_path / "short.jsonl"
    path.write_text('{"text": "One short line."}\n{"text": "Another."}\n{"text": "A third."}\n')
    count = len(plain.encode("One short line.\n\nAnother.\n\nA third.").ids)
    with pytest.raises(CalibrationError, match=rf"short\.jsonl: {count} tokens, but 16 samples of 128 are 2048; "):
        load_tokens(spec(dataset=str(path), samples=16, seq_len=128), plain_json)
    got = load_tokens(spec(dataset=str(path), samples=16, seq_len=128, allow_fewer=True), plain_json)
    assert got.tokens_used == count == sum(len(row) for row in got.tokens)
    assert plain.decode(flat(got)) == "One short line.\n\nAnother.\n\nA third."


def test_a_long_text_is_used_to_its_end(tmp_path, plain, plain_json):
    text = "words and words " * 1000
    ids = plain.encode(text).ids
    (tmp_path / "long.txt").write_text(text)
    asked = spec(dataset=str(tmp_path / "long.txt"), samples=len(ids), seq_len=512, allow_fewer=True)
    got = load_tokens(asked, plain_json)
    assert flat(got) == ids
    assert got.tokens_used == len(ids)


def test_exactly_enough_is_enough(tmp_path, plain, plain_json):
    text = "abc def " * 200
    count = len(plain.encode(text).ids)
    (tmp_path / "a.txt").write_text(text)
    seq_len = count // 4
    got = load_tokens(spec(dataset=str(tmp_path / "a.txt"), samples=4, seq_len=seq_len), plain_json)
    assert got.tokens_used == 4 * seq_len
    with pytest.raises(CalibrationError, match=f"{count} tokens"):
        load_tokens(spec(dataset=str(tmp_path / "a.txt"), samples=5, seq_len=seq_len), plain_json)


def test_relative_files_are_found_beside_the_recipe(tmp_path, plain_json, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.txt").write_text("word " * 500)
    monkeypatch.chdir(tmp_path)
    assert load_tokens(spec(dataset="a.txt"), plain_json, base_dir=tmp_path / "recipes").tokens_used == 128
    with pytest.raises(CalibrationError, match=r"^a\.txt: No such file"):
        load_tokens(spec(dataset="a.txt"), plain_json)


def test_hub_texts_are_read_only_as_far_as_needed(monkeypatch, plain_json):
    asked, seen = [], []

    def texts(name, **options):
        asked.append((name, options))
        while True:
            seen.append(1)
            yield "some words to measure"

    # The package re-exports the function under the module's name.
    module = sys.modules[load_tokens_function.__module__]
    monkeypatch.setattr(module, "hub_texts", texts)
    got = load_tokens(spec(dataset="hub:org/name", split="test", field="body", seed=5), plain_json)
    assert got.tokens_used == 128
    assert asked == [("org/name", {"split": "test", "field": "body", "seed": 5})]
    assert len(seen) < 60


@pytest.mark.parametrize("dataset", ["wikitext", "data.csv", "org/name"])
def test_unknown_data_sets_are_refused(plain_json, dataset):
    with pytest.raises(CalibrationError, match=r"neither python-docs, a \.txt or \.jsonl file, nor hub:"):
        load_tokens(spec(dataset=dataset), plain_json)


def test_an_empty_file_is_refused_even_if_fewer_are_allowed(tmp_path, plain_json):
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(CalibrationError, match="holds no text at all"):
        load_tokens(spec(dataset=str(tmp_path / "a.txt"), allow_fewer=True), plain_json)


def test_no_tokenizer_is_refused():
    with pytest.raises(CalibrationError, match="no tokenizer"):
        load_tokens(spec(), None)


def test_calibration_needs_no_torch():
    code = "import sys, optimc_passes.calibrate; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
