"""The manifest of a finished build, and the hash that says whether there is anything to rebuild."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import optimc
from optimc.build.lowering_options import lowering_options
from optimc.plan import (
    FORMAT_VERSION,
    Limits,
    Manifest,
    ModelInfo,
    PlanTensor,
    Source,
    TargetInfo,
    TokenIds,
)
from optimc.plan.tensor_names import CHAT_TEMPLATE, SPECIAL_TOKENS, TOKENIZER
from optimc.recipe import Recipe

if TYPE_CHECKING:
    from optimc_passes.base import Pass
    from optimc_passes.calibrate import Calibration
    from optimc_passes.checkpoint import Checkpoint, TokenizerAssets
    from optimc_passes.emit import Lowered
    from optimc_passes.pipeline import PipelineResult

_TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def tool_versions(backend: str | None = None) -> dict[str, str]:
    """Return the version of every package that shapes a plan's bytes, those of one target alone included."""
    from optimc_passes.emit import TARGETS

    own = () if backend is None else TARGETS[backend].packages
    versions = {"optimc": optimc.__version__}
    for name in (*_TOOLS, *own):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def build_key(recipe: Recipe, passes: Sequence[Pass[Any]], model_digest: str) -> str:
    """Return the hash of everything a plan is made from: recipe, checkpoint, passes, tools, plan format, and the
    machine if the target's plans are for that alone; `require_target` has found it fit.
    """
    from optimc_passes.emit import TARGETS
    from optimc_passes.frontend import FRONTEND_VERSION

    target = TARGETS[recipe.target.backend]
    machine = target.machine(lowering_options(recipe.target, recipe.limits))
    facts = {
        "format": FORMAT_VERSION,
        "recipe": recipe.digest,
        "model": model_digest,
        "frontend": FRONTEND_VERSION,
        "lowering": target.version,
        "passes": [[pass_.name, pass_.version, pass_.source_digest] for pass_ in passes],
        "tools": tool_versions(recipe.target.backend),
        **({} if machine is None else {"machine": machine}),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def assemble_manifest(
    recipe: Recipe,
    checkpoint: Checkpoint,
    calibration: Calibration | None,
    lowered: Lowered,
    result: PipelineResult,
    *,
    key: str,
    max_seq_len: int,
) -> Manifest:
    """Return the manifest of a build; `write_plan` adds the tensors' hashes."""
    from optimc_passes.emit.heads_tensors import described_heads
    from optimc_passes.frontend.support import architecture
    from optimc_passes.weights import Quantized

    config = checkpoint.config.get_text_config(decoder=True)
    return Manifest(
        format_version=FORMAT_VERSION,
        name=recipe.name,
        target=TargetInfo(backend=recipe.target.backend, requirements=lowered.requirements),
        model=ModelInfo(
            architecture=architecture(checkpoint.config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
        ),
        limits=Limits(
            max_seq_len=max_seq_len,
            max_step_tokens=recipe.limits.max_step_tokens,
            max_seqs=recipe.limits.max_seqs,
            kv_memory_bytes=recipe.limits.kv_memory,
        ),
        kv=lowered.kv,
        tokens=TokenIds(bos=checkpoint.bos, eos=checkpoint.eos, pad=checkpoint.pad),
        generation_defaults=dict(checkpoint.generation_defaults),
        quantization={
            name: {
                "method": weight.method,
                "bits": weight.bits,
                "group": weight.group,
                "symmetric": weight.symmetric,
            }
            for name, weight in result.artifact.weights.items()
            if isinstance(weight, Quantized)
        },
        medusa=None if result.artifact.heads is None else described_heads(result.artifact.heads),
        program=lowered.program,
        passes=result.reports,
        graph=result.graph,
        source=Source(
            model=checkpoint.source,
            model_hash=checkpoint.digest,
            recipe=recipe.model_dump(mode="json"),
            recipe_hash=recipe.digest,
            calibration_hash=calibration.digest if calibration else None,
            build_key=key,
            tools=tool_versions(recipe.target.backend),
        ),
    )


def tokenizer_tensors(assets: TokenizerAssets) -> list[PlanTensor]:
    """Return the tokenizer's files as the plan holds them."""
    blobs = {
        TOKENIZER: assets.tokenizer_json,
        CHAT_TEMPLATE: assets.chat_template.encode() if assets.chat_template is not None else None,
        SPECIAL_TOKENS: json.dumps(dict(assets.special_tokens)).encode() if assets.special_tokens else None,
    }
    return [PlanTensor.from_bytes(name, data) for name, data in blobs.items() if data is not None]
