import random

import numpy as np
import pytest

from optimc.measure.prefix.trie import common_prefix, longest_earlier_prefixes, sorted_order


def units(*values):
    return np.array(values, np.int32)


def test_a_common_prefix_ends_at_the_first_difference():
    assert common_prefix(units(1, 2, 3), units(1, 2, 4)) == 2
    assert common_prefix(units(1, 2), units(1, 2, 4)) == 2
    assert common_prefix(units(), units(1)) == 0
    long = np.arange(5000, dtype=np.int32)
    other = long.copy()
    other[4321] = 7
    assert common_prefix(long, other) == 4321


def test_order_is_lexicographic_and_by_value_not_by_byte():
    # 256 and 1 differ in the second byte: a little-endian sort would swap them.
    assert sorted_order([units(256), units(1), units(1, 0), units()]) == [3, 1, 2, 0]


def test_sequences_that_differ_late_are_sorted_chunk_by_chunk():
    base = [0] * 600
    sequences = [units(*base, 3), units(*base, 1), units(*base), units(*base[:300])]
    assert sorted_order(sequences) == [3, 2, 1, 0]


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_earlier_prefix_is_what_comparing_with_all_gives(seed):
    draw = random.Random(seed)
    sequences = [units(*(draw.randrange(2) for _ in range(draw.randrange(12)))) for _ in range(60)]
    lengths, partners = longest_earlier_prefixes(sequences)
    for index, (length, partner) in enumerate(zip(lengths, partners, strict=True)):
        others = [common_prefix(sequences[index], sequences[earlier]) for earlier in range(index)]
        assert length == max(others, default=0)
        assert (partner is None) == (length == 0)
        if partner is not None:
            assert partner < index
            assert common_prefix(sequences[index], sequences[partner]) == length
