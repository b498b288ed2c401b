"""What a pass decided for those after it: the number format of each linear layer and of each layer's KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from optimc.plan import KvDtype, KvKeys, KvProvenance

KV_PREFIX = "kv_cache."
"""Reserved names in a weight store: "kv_cache.{layer}.key_scales" and ".key_minimums", Dense float32 [Hkv, D]. They
belong to the cache's layout and never reach the graph."""


@dataclass(frozen=True)
class Scheme:
    """How one linear layer is stored."""

    bits: int | None
    """None: it stays dense."""
    group: int
    """Columns that share a scale; -1: the whole row."""
    symmetric: bool


@dataclass(frozen=True)
class KvChoice:
    """How one attention layer's cache is stored."""

    dtype: KvDtype
    keys: KvKeys
    provenance: KvProvenance
    tokens: int
    """Calibration tokens behind the scales; 0 where there are none."""


@dataclass(frozen=True)
class Choices:
    """Everything decided so far."""

    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    """By module name of the linear layer."""
    kv: tuple[KvChoice, ...] = ()
    """By layer; empty: the target's `kv_dtype` for all."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "schemes": {layer: asdict(scheme) for layer, scheme in self.schemes.items()},
            "kv": [asdict(choice) for choice in self.kv],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Choices:
        """Return what `to_json` wrote. Raises KeyError or TypeError if it did not."""
        schemes = {layer: Scheme(**facts) for layer, facts in data["schemes"].items()}
        return cls(schemes, tuple(KvChoice(**facts) for facts in data["kv"]))
