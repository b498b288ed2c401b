"""Who owns which block of the KV pool. Ids only: the bytes belong to the executor.

Every block is in exactly one of three states:

    free          nobody's, content meaningless
    referenced    refcount > 0: in the block table of that many sequences, or pinned
    cached-idle   refcount 0, but its content is known to the prefix cache; evicted least recently used first
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NewType

BlockId = NewType("BlockId", int)


class BlockPool:
    """P blocks of S slots with reference counts.

    `on_evict(block)` is called before a cached-idle block is handed out again, so that whoever knew its content forgets
    it first. Deterministic: the same calls give the same ids.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[BlockId], None] | None = None
        self.num_released = 0
        """Grows whenever a block loses its last reference: what did not fit may fit once this has changed."""
        self._refcount = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._free = [BlockId(block) for block in range(num_blocks - 1, -1, -1)]
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks whose content means nothing."""
        return len(self._free)

    @property
    def num_cached_idle(self) -> int:
        """Blocks nobody references that the prefix cache can still serve."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Blocks `allocate` could hand out now: free and cached-idle ones."""
        return len(self._free) + len(self._idle)

    def refcount(self, block: BlockId) -> int:
        """References to `block`: sequences that hold it, and a pin."""
        return self._refcount[block]

    def allocate(self, count: int) -> list[BlockId] | None:
        """Hand out `count` blocks with refcount 1, free ones first, then evicted ones; None, and no change, if there
        are not that many."""
        assert count >= 0
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refcount[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: BlockId) -> None:
        """Add a reference to a kept block (a prefix hit). Raises ValueError if its content is not kept."""
        if not self._kept[block]:
            raise ValueError(f"block {block} is shared, but its content is not cached")
        if self._refcount[block] == 0:
            del self._idle[block]
        self._refcount[block] += 1

    def free(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference from each block of a sequence, given in sequence order. The last block becomes idle first
        and is evicted first: a prefix is worth nothing without what precedes it.

        Raises ValueError if a block has no reference left (a double free).
        """
        for block in reversed(blocks):
            if self._refcount[block] <= 0:
                raise ValueError(f"block {block} is freed twice")
            self._refcount[block] -= 1
            if self._refcount[block] == 0:
                self.num_released += 1
                if self._kept[block]:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def keep(self, block: BlockId) -> None:
        """Mark a referenced block's content as cached: without references it becomes idle instead of free."""
        assert self._refcount[block] > 0
        self._kept[block] = 1

    def forget(self, block: BlockId) -> None:
        """Undo `keep`."""
        assert self._kept[block]
        self._kept[block] = 0
        if self._refcount[block] == 0:
            del self._idle[block]
            self._free.append(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + referenced + cached-idle == P and the three are disjoint."""
        referenced = [block for block, count in enumerate(self._refcount) if count > 0]
        assert min(self._refcount) >= 0, "negative refcount"
        assert len(self._free) + len(referenced) + len(self._idle) == self.num_blocks, (
            f"{len(self._free)} free + {len(referenced)} referenced + {len(self._idle)} cached-idle "
            f"!= {self.num_blocks} blocks"
        )
        assert {*self._free, *referenced, *self._idle} == set(range(self.num_blocks)), "a block is in two states"
        assert all(self._kept[block] for block in self._idle), "an idle block is not kept"
        assert not any(self._kept[block] for block in self._free), "a free block is kept"

    def _evict(self) -> BlockId:
        block, _ = self._idle.popitem(last=False)
        self._kept[block] = 0
        if self.on_evict is not None:
            self.on_evict(block)
        return block
