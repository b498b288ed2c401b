"""Which linear layers a pass is about, as patterns in its configuration."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from optimc_passes.base import PassConfig
from optimc_passes.quantize.selection import EVERY_LAYER, HEAD_PATTERN


class LayerPatterns(PassConfig):
    """The layers a pass is about."""

    only: tuple[str, ...] = Field(default=(EVERY_LAYER,), min_length=1, strict=False)
    """Layers this pass is about, so that a recipe can treat some with other options than the rest: patterns as in
    `ignore`, which takes its share out of them. To `rtn`, `embedding` means the input embedding, which it leaves alone
    unless it is named so."""
    ignore: tuple[str, ...] = Field(default=(HEAD_PATTERN,), strict=False)
    """Layers left as they are: globs over module names, or regular expressions after `re:`. `lm_head` means the output
    head whatever its name."""

    @field_validator("only", "ignore")
    @classmethod
    def _patterns_compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    raise ValueError(f"'{pattern}' is not a regular expression: {error}") from error
        return patterns
