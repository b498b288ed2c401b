"""Blocks in the store: each is saved as it ends, under its own plan, switches and load and whom it was paired with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from optimc.measure.attribution.block import Block
from optimc.measure.attribution.engines import Contender
from optimc.measure.attribution.paired import ORDER
from optimc.measure.machine import Machine
from optimc.measure.store import MeasurementStore, measurement_key
from optimc.measure.workload import Workload


class KeptBlocks:
    """Blocks of pairs by place. `fresh` ignores what earlier runs left, but not what this one measured."""

    def __init__(self, store: MeasurementStore, machine: Machine, *, fresh: bool = False) -> None:
        self._store = store
        self._machine = machine
        self._fresh = fresh
        self._written: set[Path] = set()

    def load(self, with_: Contender, without: Contender, workload: Workload, pair: int, place: int) -> Block | None:
        """Return the block measured at `place` of pair number `pair`, if there is one."""
        key = self._key(with_, without, workload, pair, place)
        if self._fresh and self._store.path(key) not in self._written:
            return None
        found = self._store.load_as(key, Block.from_json)
        return None if found is None else found[0]

    def save(
        self, with_: Contender, without: Contender, workload: Workload, pair: int, place: int, block: Block
    ) -> None:
        """Keep a block."""
        key = self._key(with_, without, workload, pair, place)
        self._store.save(key, block.to_json())
        self._written.add(self._store.path(key))

    def _key(self, with_: Contender, without: Contender, workload: Workload, pair: int, place: int) -> dict[str, Any]:
        side = ORDER[place]
        own, other = (with_, without) if side == "with" else (without, with_)
        rival = other.subject
        details = {
            "side": side,
            "against": [rival.content_hash, rival.serving_hash, other.switches.to_json()],
            "pair": pair,
            "block": place,
        }
        seeded = replace(workload, seed=workload.seed + pair)
        return measurement_key(own.subject, seeded, own.switches, self._machine, "pair", details)
