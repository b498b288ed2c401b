"""The checkpoint a recipe names, and where what its passes finish is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.build.inputs import BuildInputs, BuildOptions

if TYPE_CHECKING:
    from optimc_passes.checkpoint import Checkpoint


def load_model(inputs: BuildInputs, options: BuildOptions, check_config: Callable[[Any], None]) -> Checkpoint:
    """Load the recipe's model; `check_config` sees its configuration before a weight is looked at.

    Raises CheckpointError, UnsupportedModelError, and what `check_config` raises.
    """
    from optimc_passes.load import load_checkpoint

    spec = inputs.recipe.model
    return load_checkpoint(
        inputs.model,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        cache_dir=options.cache,
        check_config=check_config,
    )


@contextmanager
def cache_folder(options: BuildOptions) -> Iterator[Path]:
    """Give the cache, or an empty one of one's own: a pass's finished weights lie there, not in memory."""
    if not options.fresh:
        yield options.cache
        return
    from optimc_passes.cache_entry import scratch_folder

    with scratch_folder(options.cache) as folder:
        yield folder
