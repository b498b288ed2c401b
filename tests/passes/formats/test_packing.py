import numpy as np
import pytest

from optimc_passes.formats import packing
from optimc_passes.formats.packing import pack_awq, pack_bits, packed_words, unpack_awq, unpack_bits


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [1, 10, 11, 21, 32, 33, 64])
def test_words_are_those_of_the_stream_of_bits(unpack, bits, count):
    codes = np.random.default_rng(count).integers(0, 2**bits, (3, count), dtype=np.uint8)
    words = pack_bits(codes, bits)
    assert words.dtype == np.int32
    assert words.shape == (3, packed_words(count, bits))
    for row, packed in zip(codes, words, strict=True):
        assert [int(word) & 0xFFFFFFFF for word in packed] == unpack.words_of(row, bits)
    assert np.array_equal(unpack_bits(words, bits, count), codes)


def test_three_bits_straddle_words():
    codes = np.zeros((1, 32), np.uint8)
    codes[0, 10] = 0b101  # bits 30, 31 and 32 of the stream
    assert pack_bits(codes, 3).view(np.uint32).tolist() == [[1 << 30, 1, 0]]


def test_the_top_bit_of_a_word_is_its_sign():
    assert pack_bits(np.array([[0, 0, 0, 8, 0, 0, 0, 8]], np.uint8), 4)[0, 0] == np.int32(-(2**31) + (8 << 12))


def test_columns_of_a_matrix_may_be_given_transposed():
    codes = np.random.default_rng(0).integers(0, 16, (40, 8), dtype=np.uint8)
    assert np.array_equal(pack_bits(codes.T, 4), pack_bits(np.ascontiguousarray(codes.T), 4))


def test_pieces_are_the_whole(monkeypatch):
    codes = np.random.default_rng(1).integers(0, 8, (37, 50), dtype=np.uint8)
    whole = pack_bits(codes, 3)
    monkeypatch.setattr(packing, "_PIECE_BYTES", 1000)
    assert np.array_equal(pack_bits(codes, 3), whole)
    assert np.array_equal(unpack_bits(whole, 3, 50), codes)


def test_awq_shuffles_each_eight(unpack):
    codes = np.random.default_rng(2).integers(0, 16, (5, 24), dtype=np.uint8)
    words = pack_awq(codes)
    for row, packed in zip(codes, words, strict=True):
        assert [int(word) & 0xFFFFFFFF for word in packed] == unpack.awq_words(row)
    assert np.array_equal(unpack_awq(words), codes)


def test_first_nibbles_of_an_awq_word():
    assert pack_awq(np.arange(8, dtype=np.uint8)[None]).view(np.uint32)[0, 0] == 0x75316420
