"""A plan that is to be measured."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from optimc.plan import Manifest, Plan


@dataclass(frozen=True, slots=True)
class PlanSubject:
    """What of a plan names it and determines its figures. The plan itself is closed again."""

    name: str
    path: Path
    """Absolute."""
    size_bytes: int
    manifest: Manifest
    content_hash: str
    """Of the bytes that compute."""
    serving_hash: str
    """Of what makes other steps of the same bytes: limits, KV layout, target."""

    @classmethod
    def open(cls, path: Path) -> PlanSubject:
        """Read it from a plan. Raises PlanError."""
        with Plan.open(path) as plan:
            manifest = plan.manifest
            sections = (manifest.limits, manifest.kv, manifest.target)
            return cls(
                name=manifest.name,
                path=path.resolve(),
                size_bytes=plan.size_bytes,
                manifest=manifest,
                content_hash=plan.content_hash,
                serving_hash=hashlib.sha256("".join(s.model_dump_json() for s in sections).encode()).hexdigest(),
            )
