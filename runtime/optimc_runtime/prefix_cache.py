"""Which full blocks already hold the K/V of which token prefix.

A block's content is determined by everything before it, so blocks form a tree: a node is one full block of token ids
below its parent, below a root that stands for the tagged extras (engine, salt). Nodes are found by a chained hash of
parent and token ids; a hit counts only if the node hangs below the very parent matched before and its token ids are
equal, so a collision costs a hit, never a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.block_pool import BlockId, BlockPool

Extras = tuple[tuple[str, str], ...]
"""What K/V depends on besides tokens, as (kind, value) pairs: a salt "x" and an adapter "x" are different things."""

BlockHash = Callable[[bytes, bytes], bytes]


def chain_hash(parent: bytes, content: bytes) -> bytes:
    """Hash of a block: BLAKE2b-256 over the parent's hash and the block's content."""
    return hashlib.blake2b(parent + content, digest_size=32).digest()


class PrefixNode:
    """One full block of token ids below its parent. `block` is None while no block holds its K/V."""

    __slots__ = ("block", "extras", "key", "parent", "tokens", "uses")

    def __init__(self, key: bytes, parent: PrefixNode | None, tokens: bytes, extras: Extras = ()) -> None:
        self.key = key
        self.parent = parent
        """None for a root."""
        self.tokens = tokens
        self.extras = extras
        """Of a root; nodes below inherit them."""
        self.block: BlockId | None = None
        self.uses = 0
        """Children, plus sequences that publish below this. A node with neither block nor uses is dropped."""


class PrefixCache:
    """Finds and publishes full blocks; forgets a block's key before the pool reuses it."""

    def __init__(self, pool: BlockPool, engine_id: str, block_hash: BlockHash = chain_hash) -> None:
        self._pool = pool
        self._engine_id = engine_id
        self._hash = block_hash
        self._roots: dict[Extras, PrefixNode] = {}
        self._nodes: dict[bytes, PrefixNode] = {}
        self._by_block: dict[BlockId, PrefixNode] = {}
        self.num_evicted = 0
        """Blocks whose content was given up for room."""
        pool.on_evict = self._drop_block

    def __len__(self) -> int:
        """Blocks that can be hit."""
        return len(self._by_block)

    def match(self, tokens: NDArray[np.int64], extras: Extras) -> list[PrefixNode]:
        """Return the nodes of the longest cached prefix of `tokens` ([n] ids; a partial last block is not looked at).

        Takes no references: `BlockPool.share` the blocks before anything else is allocated.
        """
        size = self._pool.block_size
        parent = self._roots.get(extras)
        nodes: list[PrefixNode] = []
        if parent is None:
            return nodes
        for start in range(0, len(tokens) - size + 1, size):
            content = tokens[start : start + size].tobytes()
            node = self._nodes.get(self._hash(parent.key, content))
            if node is None or node.block is None or node.parent is not parent or node.tokens != content:
                break
            nodes.append(node)
            parent = node
        return nodes

    def lease(self, nodes: Sequence[PrefixNode], extras: Extras) -> PrefixNode:
        """Return the node below which a sequence that matched `nodes` will publish, held until `release`."""
        node = nodes[-1] if nodes else self._roots.get(extras)
        if node is None:
            tagged = (("engine", self._engine_id), *extras)
            content = b"".join(_length_prefixed(part) for pair in tagged for part in pair)
            node = self._roots[extras] = PrefixNode(self._hash(b"", content), None, b"", extras)
        node.uses += 1
        return node

    def publish(self, parent: PrefixNode, tokens: NDArray[np.int64], block: BlockId) -> PrefixNode | None:
        """Make `block`, which holds the K/V of `tokens` ([S] ids) below the leased `parent`, visible to `match`.

        Moves the lease to the returned node. If another block already holds the same content, that one stays the
        visible one. None if the key belongs to other content: the lease is released, nothing more can be published.
        """
        content = tokens.tobytes()
        key = self._hash(parent.key, content)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = PrefixNode(key, parent, content)
            parent.uses += 1
        elif node.parent is not parent or node.tokens != content:
            self.release(parent)
            return None
        if node.block is None:
            node.block = block
            self._by_block[block] = node
            self._pool.keep(block)
        node.uses += 1
        self.release(parent)
        return node

    def release(self, node: PrefixNode) -> None:
        """Give back a lease."""
        assert node.uses > 0
        node.uses -= 1
        self._prune(node)

    def clear(self) -> None:
        """Forget everything. Leases become void: their holders must drop, not release, them."""
        for block in self._by_block:
            self._pool.forget(block)
        self._by_block.clear()
        self._nodes.clear()
        self._roots.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, nodes and parents agree."""
        for block, node in self._by_block.items():
            assert node.block == block, "a block and its node disagree"
            assert self._nodes.get(node.key) is node, "a cached block cannot be found"
        children: dict[PrefixNode, int] = {}
        for node in self._nodes.values():
            assert node.block is not None or node.uses > 0, "a dead node was not dropped"
            assert node.parent is not None
            children[node.parent] = children.get(node.parent, 0) + 1
        for node in (*self._nodes.values(), *self._roots.values()):
            assert node.uses >= children.get(node, 0), "a node is used less often than it has children"

    def _drop_block(self, block: BlockId) -> None:
        self.num_evicted += 1
        node = self._by_block.pop(block)
        node.block = None
        self._prune(node)

    def _prune(self, node: PrefixNode) -> None:
        while node.uses == 0 and node.block is None:
            if node.parent is None:
                del self._roots[node.extras]
                return
            del self._nodes[node.key]
            node = node.parent
            node.uses -= 1


def _length_prefixed(part: str) -> bytes:
    data = part.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data
