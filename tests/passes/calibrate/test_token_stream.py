import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimc_passes.calibrate.token_stream import cut_rows, encode_texts, opening_tokens


def test_opening_is_what_stands_before_a_text(plain, with_bos):
    assert opening_tokens(plain) == []
    assert opening_tokens(with_bos) == [0]


def test_texts_are_joined_by_blank_lines_without_special_tokens(with_bos):
    stream = encode_texts(with_bos, ["One text.", "", "  \n", "Another."])
    assert with_bos.decode(stream.tolist(), skip_special_tokens=False) == "One text.\n\nAnother."
    assert stream.dtype == np.int32


def test_encoding_stops_after_the_text_that_is_enough(plain):
    seen = []

    def endless():
        while True:
            seen.append(1)
            yield "some words"

    assert 20 <= len(encode_texts(plain, endless(), enough_tokens=20)) < 60
    assert len(seen) < 20


def test_no_text_is_an_empty_stream(plain):
    assert encode_texts(plain, []).tolist() == []


@given(length=st.integers(0, 200), seq_len=st.integers(2, 40), opening=st.lists(st.integers(0, 9), max_size=1))
def test_rows_hold_every_token_once_and_no_padding(length, seq_len, opening):
    stream = np.arange(100, 100 + length, dtype=np.int32)
    rows = cut_rows(stream, seq_len, opening)
    assert all(row.tolist()[: len(opening)] == opening for row in rows)
    assert [token for row in rows for token in row[len(opening) :].tolist()] == stream.tolist()
    assert all(len(row) == seq_len for row in rows[:-1])
    assert all(len(opening) < len(row) <= seq_len for row in rows)


def test_an_opening_that_fills_the_row_is_our_own_mistake():
    with pytest.raises(AssertionError):
        cut_rows(np.arange(3, dtype=np.int32), 1, [0])
