"""Cached prefixes that stay: nothing evicts a block that is referenced, and these are, by nobody's sequence."""

from __future__ import annotations

from collections.abc import Iterable

from optimc.errors import ConfigError, Fault
from optimc_runtime.block_pool import BlockId, BlockPool
from optimc_runtime.config import StepLimits


class Pins:
    """Holds one reference to each pinned block; at most half of the pool's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[BlockId, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._blocks

    def add(self, blocks: Iterable[BlockId]) -> None:
        """Pin cached blocks, of which those that prefixes have in common may be pinned already.

        Raises ConfigError, and pins none, if they are too many.
        """
        missing = [block for block in blocks if block not in self._blocks]
        check_room(len(self._blocks), len(missing), self._pool.num_blocks)
        for block in missing:
            self._pool.share(block)
            self._blocks[block] = None

    def drop(self) -> None:
        """Let go of all."""
        self._pool.free(list(self._blocks))
        self._blocks.clear()


def check_prefix(num_tokens: int, limits: StepLimits, *, is_cached: bool) -> None:
    """Raise ConfigError if a prefix of that many tokens cannot be pinned, whatever it begins with."""
    if not is_cached:
        raise _fault("needs the prefix cache, which is off")
    if num_tokens < limits.block_size:
        raise _fault(f"the prefix has {num_tokens} tokens; only whole blocks of {limits.block_size} are cached")
    check_room(0, num_tokens // limits.block_size, limits.num_blocks)


def check_room(pinned: int, more: int, num_blocks: int) -> None:
    """Raise ConfigError if `more` blocks would make the pinned ones more than half of the pool's."""
    if pinned + more > num_blocks // 2:
        beside = f" beside the {pinned:,} pinned already" if pinned else ""
        raise _fault(
            f"the prefix takes {more:,} blocks{beside}; at most half of the pool's {num_blocks:,} may be pinned, "
            "give more KV memory or a shorter prefix"
        )


def _fault(reason: str) -> ConfigError:
    return ConfigError("options", [Fault("--pin-prefix", reason)])
