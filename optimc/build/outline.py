"""A dry run: everything that can be said about a build without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimc.build.inputs import BuildInputs, BuildOptions, read_inputs
from optimc.build.kv_references import check_kv
from optimc.build.lowering_options import require_target
from optimc.errors import ConfigError, Fault
from optimc.recipe import Recipe


@dataclass(frozen=True)
class BuildOutline:
    """What a build would do."""

    recipe: Recipe
    model: str
    architecture: str
    max_seq_len: int
    passes: tuple[str, ...]
    output: Path

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "name": self.recipe.name,
            "model": self.model,
            "architecture": self.architecture,
            "max_seq_len": self.max_seq_len,
            "target": self.recipe.target.backend,
            "passes": list(self.passes),
            "output": str(self.output),
        }


def plan_build(recipe_path: Path, options: BuildOptions) -> BuildOutline:
    """Check recipe, model configuration, limits and target as a build would, without reading a weight.

    Raises ConfigError, CheckpointError or UnsupportedModelError in words.
    """
    from optimc_passes.frontend.support import architecture

    inputs = read_inputs(recipe_path, options)
    require_target(inputs.recipe)
    from optimc_passes.load import load_config

    recipe = inputs.recipe
    config = load_config(inputs.model, revision=recipe.model.revision, trust_remote_code=recipe.model.trust_remote_code)
    max_seq_len = check_model(inputs, config)
    check_kv(inputs, config, max_seq_len)
    return BuildOutline(
        recipe=recipe,
        model=inputs.model,
        architecture=architecture(config),
        max_seq_len=max_seq_len,
        passes=tuple(pass_.name for pass_ in inputs.passes),
        output=inputs.output,
    )


def check_model(inputs: BuildInputs, config: Any) -> int:
    """Return the engine's longest sequence in tokens.

    Raises ConfigError if the recipe's limits exceed the model's, UnsupportedModelError if the
    frontend cannot export the model.
    """
    from optimc_passes.frontend import check_supported

    limits = inputs.recipe.limits
    trained = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    max_seq_len = trained if limits.max_seq_len is None else limits.max_seq_len
    faults = []
    if max_seq_len is None:
        faults.append(Fault("limits.max_seq_len", "is required: the model's configuration names no longest sequence"))
    elif trained is not None and max_seq_len > trained:
        faults.append(Fault("limits.max_seq_len", f"{max_seq_len} exceeds the model's {trained} positions"))
    if faults or max_seq_len is None:
        raise ConfigError(str(inputs.recipe_path), faults)
    check_supported(config, max_seq_len=max_seq_len, allow_untested=inputs.recipe.model.allow_untested)
    return int(max_seq_len)
