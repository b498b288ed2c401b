"""Shapes of optimization profiles from a recipe's limits."""

import pytest

from optimc_passes.emit.tensorrt.profiles import draft_profile, input_shapes, model_profiles


def test_decode_calls_hold_trees_of_every_sequence_and_prefill_calls_one_chunk():
    decode, prefill = model_profiles(max_seqs=64, max_step_tokens=512, max_seq_len=2048)
    assert decode.largest == {"T": 512, "B": 64, "Q": 16, "C": 2048, "R": 512}
    assert decode.likely == {"T": 8, "B": 8, "Q": 1, "C": 1024, "R": 8}
    assert prefill.largest == {"T": 512, "B": 1, "Q": 512, "C": 2048, "R": 512}
    assert prefill.likely == {"T": 512, "B": 1, "Q": 512, "C": 1024, "R": 1}


@pytest.mark.parametrize("limits", [(1, 1, 2), (1, 512, 64), (64, 8, 2048), (3, 100, 50)])
def test_no_size_is_0_and_none_is_likelier_than_it_can_be(limits):
    for profile in (*model_profiles(*limits), draft_profile(limits[0])):
        for letter, least in profile.smallest.items():
            assert 1 <= least <= profile.likely[letter] <= profile.largest[letter]


def test_a_step_smaller_than_its_sequences_bounds_their_number():
    decode, _ = model_profiles(max_seqs=64, max_step_tokens=8, max_seq_len=128)
    assert decode.largest == {"T": 8, "B": 8, "Q": 8, "C": 128, "R": 8}


def test_dimensions_of_inputs_follow_their_letters():
    decode, _ = model_profiles(max_seqs=4, max_step_tokens=32, max_seq_len=100)
    assert input_shapes(("B", "Q"), decode) == ((1, 1), (4, 1), (4, 16))
    # A window's context and its keys, which are context and the call's own.
    assert input_shapes(("B", "C_window_8"), decode) == ((1, 1), (4, 100), (4, 100))
    assert input_shapes(("B", "Q", "K_window_8"), decode) == ((1, 1, 2), (4, 1, 101), (4, 16, 116))
    with pytest.raises(KeyError, match="Z"):
        input_shapes(("Z",), decode)


def test_a_pool_may_grow_to_what_32_bits_index():
    (smallest, likely, largest) = input_shapes(("rows", 1024), draft_profile(1))
    assert (smallest, likely) == ((1, 1024), (65536, 1024))
    assert largest[0] * 1024 < 1 << 31 <= (largest[0] + 1) * 1024
