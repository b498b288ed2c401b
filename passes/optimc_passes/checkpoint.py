"""What a checkpoint is, apart from its weights: configuration, tokenizer files, special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimc_passes.weights import WeightStore


@dataclass(frozen=True)
class TokenizerAssets:
    """Everything the runtime needs to turn text into ids and back; bytes as they go into the plan."""

    tokenizer_json: bytes | None
    """A `tokenizers` file; None when the checkpoint has no tokenizer at all (then only ids can be served)."""
    chat_template: str | None
    """Jinja2 source, or None: then the chat endpoint says so."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, pad_token, ...: what templates refer to."""


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. `config` is the transformers config; weights are keyed by the model's parameter names."""

    source: str
    """What the recipe called it."""
    digest: str
    """SHA-256 over configuration, tokenizer and weights: the root of the build cache's keys."""
    config: Any
    """transformers.PretrainedConfig, with torch_dtype and trust settings already resolved."""
    weights: WeightStore
    tokenizer: TokenizerAssets
    bos: int | None
    eos: tuple[int, ...]
    """Union of config, generation_config and tokenizer, ascending."""
    pad: int | None
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling settings of generation_config that differ from neutral: temperature, top_p, ..."""
    notes: tuple[str, ...] = ()
    """Choices made while loading, one sentence each, for the report."""
    folder: Path | None = None
    """Where its files lie, for whoever copies those that are not weights; None for a checkpoint made in memory."""
