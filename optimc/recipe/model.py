"""What a recipe may say. The fields are the YAML keys; unknown keys are faults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from optimc.byte_size import SIZE, parse_bytes


def _parse_size(value: object) -> object:
    """Turn "512MiB" into 536870912; leave everything that is not a string to the type check."""
    return parse_bytes(value) if isinstance(value, str) else value


ByteSize = Annotated[
    int,
    BeforeValidator(_parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": SIZE.pattern}]}),
]


class _Section(BaseModel):
    # Strict: `samples: "12"` or `revision: 3` is a typing mistake in the recipe, not something to guess about.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class ModelSpec(_Section):
    """The checkpoint: a folder, a `.gguf` file, or a hub id. A plain string stands for `source`."""

    source: str = Field(min_length=1)
    """Folder or .gguf file (relative to the working directory, else to the recipe), or `organisation/name`."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    trust_remote_code: bool = False
    """Let the checkpoint's own Python code describe its configuration. Off unless you have read that code; a model that
    only such code defines is refused either way, since transformers' own classes are what is exported."""
    allow_untested: bool = False
    """Try an architecture outside the tested table; nothing but the check on probe tokens vouches for the result."""


ActivationScales = Literal["group", "row"]

Architecture = Annotated[str, Field(pattern=r"^sm_\d{2,3}$")]


class TargetSpec(_Section):
    """What the plan is lowered for."""

    backend: str = "cpu"
    """What runs the plan: `cpu`, our own kernels, `onnxruntime`, the portable reference, or `tensorrt`, NVIDIA GPUs."""
    int8_activations: bool | None = None
    """Let products with quantized weights round their activations to 8 bits: faster, a little less exact. By default
    on for `cpu`, off for `onnxruntime`; `tensorrt` does it with scales per `row`, where weights have 8 bits and one
    scale per output feature (`group_size: -1`)."""
    activation_scales: ActivationScales = "group"
    """What shares a scale of 8-bit activations: a token's features in one group of the weight, or the token's whole
    `row`, which is what W8A8 means. Without 8-bit activations it changes nothing."""
    kv_dtype: Literal["float32", "float16", "bfloat16", "int8", "int4", "fp8"] | None = None
    """What the KV pool holds. Keys and values are rounded as they are written, integers with a scale per token and
    head; attention sees them as they were rounded. By default float32 for `cpu` and `onnxruntime`, which has no other,
    and what `precision` says for `tensorrt`, which also has int8."""
    flavor: Literal["tensorrt", "rtx"] | None = None
    """Which TensorRT: full `tensorrt`, the default, builds on the GPU that serves and for no other kind; `rtx`,
    TensorRT-RTX, builds on any machine, without a GPU too, for those of `gpu`. For target `tensorrt`, as are the next
    three."""
    precision: Literal["float16", "bfloat16"] | None = None
    """What products and attention compute in, float16 by default; norms, softmax, the residual stream and logits are
    float32."""
    gpu: tuple[Architecture, ...] | None = Field(default=None, strict=False)
    """GPUs a plan of flavor `rtx` runs on: sm_80, sm_86, sm_89, sm_120, sm_121; all of them by default."""
    builder_level: int | None = Field(default=None, ge=0, le=5)
    """How long full TensorRT looks for fast kernels, from 0, seconds, to 5, very long; 3 by default. `rtx` looks for
    them where the plan is served."""


class CalibrationSpec(_Section):
    """Text that passes measure activations on."""

    dataset: str = "python-docs"
    """`python-docs` (built in, English technical prose), a .txt or .jsonl file, or `hub:organisation/name`."""
    field: str = "text"
    """Which field of a .jsonl line or data-set row holds the text."""
    split: str = "train"
    """Split of a hub data set."""
    samples: int = Field(default=128, gt=0, le=1 << 24)
    """Rows."""
    seq_len: int = Field(default=512, gt=1, le=1 << 24)
    """Tokens per row."""
    seed: int = Field(default=0, ge=0)
    """Which rows are taken, if there are more."""
    allow_fewer: bool = False
    """Go on with what there is when the text is too short, instead of stopping."""


class PassSpec(_Section):
    """One entry of `passes`: `- rtn: {bits: 4}`, just `- fuse`, or a pass of one's own, `- my_passes:DropThings`."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)


class LimitsSpec(_Section):
    """The shapes the engine is built for."""

    max_seq_len: int | None = Field(default=None, gt=1, le=1 << 24)
    """Longest sequence, prompt plus output; by default what the model was trained for."""
    max_step_tokens: int = Field(default=512, gt=0, le=1 << 20)
    """Token budget of one step."""
    max_seqs: int = Field(default=64, gt=0, le=1 << 16)
    """Most sequences in one step."""
    kv_memory: ByteSize = Field(default=1 << 30, gt=0, le=1 << 50)
    """Size of the KV pool, for example 512MiB."""
    block_size: int = Field(default=16, gt=0, le=256)
    """Tokens per KV block."""


class QualitySpec(_Section):
    """Gates `optimc compare` holds the plan against; a failed gate makes it exit with code 1."""

    max_kl: float | None = Field(default=None, gt=0, strict=False)
    """Largest mean KL divergence from the original model, in nats."""
    min_top1: float | None = Field(default=None, ge=0, le=1, strict=False)
    """Smallest share of positions whose likeliest token is the original's."""
    max_perplexity_ratio: float | None = Field(default=None, gt=0, strict=False)
    """Largest perplexity, as a multiple of the original's."""


class ReportSpec(_Section):
    """How closely a build watches itself: each weight pass is measured on text that no pass has seen."""

    windows: int = Field(default=2, ge=0, le=1 << 16)
    """Windows of the evaluation split of python-docs; 0 measures nothing."""
    length: int = Field(default=512, gt=1, le=1 << 24)
    """Tokens of a window; at most what the model was trained for."""


def _model_from_string(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


class Recipe(_Section):
    """A whole build: which model, what is done to it in which order, for which target and limits."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the plan; letters, digits, dots, dashes and underscores."""
    model: Annotated[ModelSpec, BeforeValidator(_model_from_string)]
    target: TargetSpec = TargetSpec()
    calibration: CalibrationSpec | None = None
    passes: tuple[PassSpec, ...] = Field(default=(), strict=False)
    """Applied in order; weight passes come before graph passes."""
    limits: LimitsSpec = LimitsSpec()
    quality: QualitySpec = QualitySpec()
    report: ReportSpec = ReportSpec()
    verify: Literal["off", "shapes", "numeric"] = "numeric"
    """What is checked after every graph pass: nothing, the dialect's rules and shapes, or also the logits on probe
    tokens."""

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe's canonical JSON: equal for recipes that mean the same."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


PassConfigs = Mapping[str, type[BaseModel]]
"""Pass name to the frozen model whose fields are its YAML keys. A look-up may raise ConfigError: a name that can be
known, but stands for something that is no pass."""
