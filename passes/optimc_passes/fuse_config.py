"""`- fuse` in a recipe: every rewrite of the graph in its order, but for those it skips."""

from __future__ import annotations

from pydantic import Field, field_validator

from optimc_passes.base import Pass, PassConfig
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse.rule import NoOptions

FUSE = "fuse"
"""The name that stands for all of `GRAPH_PASSES`."""


class FuseConfig(PassConfig):
    """All rewrites of the graph, in an order that lets each see what it needs."""

    skip: tuple[str, ...] = Field(default=(), strict=False)
    """Rewrites to leave out, by name."""

    @field_validator("skip")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [pass_type.name for pass_type in GRAPH_PASSES]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return names


def fuse_passes(config: FuseConfig) -> tuple[Pass[NoOptions], ...]:
    """Return the passes that `- fuse` stands for."""
    return tuple(pass_type(NoOptions()) for pass_type in GRAPH_PASSES if pass_type.name not in config.skip)
