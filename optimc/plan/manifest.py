"""What a plan says about itself. Everything here is checked before a byte of the engine is used."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from optimc.plan.fusion_report import GraphReport
from optimc.plan.heads import HeadsInfo
from optimc.plan.kv_layout import KvLayout
from optimc.plan.pass_report import PassReport

FORMAT_VERSION = 1


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetInfo(_Section):
    """The backend the engine was lowered for and what it asks of the machine."""

    backend: str
    requirements: dict[str, str] = Field(default_factory=dict)


class ModelInfo(_Section):
    """The compiled model's geometry."""

    architecture: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)


class Limits(_Section):
    """The shapes the engine was built for. The scheduler never forms a step outside them."""

    max_seq_len: int = Field(gt=0)
    """Longest sequence in tokens, prompt plus output."""
    max_step_tokens: int = Field(gt=0)
    """Most tokens T in one step."""
    max_seqs: int = Field(gt=0)
    """Most sequences B in one step."""
    kv_memory_bytes: int = Field(gt=0)
    """Default size of the KV pool; may be changed when serving."""


class TokenIds(_Section):
    """Special tokens. `eos` is the union of config, generation_config and tokenizer."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


class Source(_Section):
    """Where the plan came from."""

    model: str
    model_hash: str
    recipe: dict[str, Any]
    recipe_hash: str
    calibration_hash: str | None
    build_key: str
    """Hash of everything that shapes the bytes: recipe, checkpoint, tools. Equal keys mean nothing to rebuild."""
    tools: dict[str, str]
    """Package name to version, of everything that shaped the bytes."""


class Quality(_Section):
    """Figures of `optimc eval`, when they were measured for this plan."""

    perplexity: float
    reference_perplexity: float
    kl_mean: float
    top1_agreement: float
    tokens: int


class TensorInfo(_Section):
    """Facts about one tensor that the container does not hold."""

    sha256: str
    """Hex digest of the tensor's bytes."""


class Manifest(_Section):
    """The whole manifest. `tensors` is filled in by `write_plan`."""

    format_version: int
    name: str
    target: TargetInfo
    model: ModelInfo
    limits: Limits
    kv: KvLayout
    tokens: TokenIds
    generation_defaults: dict[str, float | int] = Field(default_factory=dict)
    """Sampling defaults of generation_config; printed at start, `--ignore-generation-config` drops them."""
    quantization: dict[str, Any] = Field(default_factory=dict)
    """Weight name to its scheme: bits, group, symmetric, method."""
    medusa: HeadsInfo | None = None
    """Heads that guess the tokens after the next; None without any."""
    program: dict[str, Any] = Field(default_factory=dict)
    """Private to the target: how its executor finds program bytes and weights among the tensors."""
    passes: tuple[PassReport, ...] = ()
    graph: GraphReport | None = None
    """Node counts and seconds of the graph stage; None in plans built before they were recorded."""
    source: Source
    quality: Quality | None = None
    tensors: dict[str, TensorInfo] = Field(default_factory=dict)
