"""What a prefix cache would have answered for a sequence of prompts, each done before the next one comes.

The rules are the runtime's (block_pool.py, prefix_cache.py): full blocks only, never the whole prompt, least recently
used blocks go first, and of one prompt the last block before the first. Outputs take no room here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from optimc.measure.prefix.trie import Units


def simulate(
    sequences: Sequence[Units],
    block_tokens: int,
    *,
    capacity_tokens: int | None = None,
    units_per_token: Sequence[int] | None = None,
) -> list[int]:
    """Return for each prompt how many of its units were in the cache, a multiple of a block.

    `capacity_tokens` is what the pool holds, None for any number; a prompt that does not fit in it finds and leaves
    nothing. `units_per_token` says of each prompt how many units make a token; one by default.
    """
    capacity = None if capacity_tokens is None else capacity_tokens // block_tokens
    idle: OrderedDict[int, None] = OrderedDict()
    """Keys of the blocks that can be hit, first to go first."""
    hits: list[int] = []
    for number, units in enumerate(sequences):
        scale = 1 if units_per_token is None else units_per_token[number]
        size = block_tokens * scale
        needed = -(-len(units) // size)
        if capacity is not None and needed > capacity:
            hits.append(0)
            continue
        keys = _block_keys(units, size)
        most = max(0, len(units) - scale) // size
        found = next((at for at, key in enumerate(keys[:most]) if key not in idle), most)
        hits.append(found * size)
        for key in keys[:found]:
            del idle[key]
        if capacity is not None:
            # `needed - found` blocks are taken: free ones first, then those that are idle longest.
            while len(idle) + needed > capacity:
                idle.popitem(last=False)
        for key in reversed(keys):
            if key not in idle:  # a block computed twice is dropped, the one that was there keeps its turn
                idle[key] = None
    return hits


def _block_keys(units: Units, size: int) -> list[int]:
    """Return a key for each full block: equal for equal content after equal content."""
    content = units.tobytes()
    width = units.itemsize * size
    keys: list[int] = []
    parent = size
    for start in range(0, len(content) - width + 1, width):
        parent = hash((parent, content[start : start + width]))
        keys.append(parent)
    return keys
