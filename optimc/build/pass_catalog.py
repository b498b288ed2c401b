"""What a recipe may write under `passes`: our passes by name, `fuse` for all rewrites of the graph, `module:Class`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from optimc.errors import ConfigError, Fault
from optimc.local_path import local_path
from optimc_passes.base import Pass
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_passes.fuse_config import FUSE, FuseConfig, fuse_passes
from optimc_passes.heads.config import MedusaConfig
from optimc_passes.heads.medusa import Medusa
from optimc_passes.registry import PASSES, checked_config, make_pass
from optimc_passes.user_pass import is_user_pass, load_user_pass, make_user_pass


class PassCatalog(Mapping[str, type[BaseModel]]):
    """Maps a name to the configuration whose fields are its options.

    A user's pass is imported from the recipe's folder when it is looked up: that runs its author's code. Looking up
    raises KeyError for an unknown name, ConfigError for a user's pass that breaks the contract. Iteration yields the
    names that exist without a recipe.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> type[BaseModel]:
        """Return the configuration of what `name` stands for."""
        return FuseConfig if name == FUSE else self._type(name).config_type

    def __iter__(self) -> Iterator[str]:
        return iter([*PASSES, FUSE])

    def __len__(self) -> int:
        return len(PASSES) + 1

    def types(self, name: str) -> tuple[type[Pass[Any]], ...]:
        """Return the passes that `name` may stand for, in order. Raises as looking up does."""
        return GRAPH_PASSES if name == FUSE else (self._type(name),)

    def make(self, name: str, options: Mapping[str, Any], where: str) -> tuple[Pass[Any], ...]:
        """Return the passes of one entry. Raises ConfigError with one fault per bad option, starting from `where`."""
        if name == FUSE:
            return fuse_passes(checked_config(FuseConfig, options, where))
        if not is_user_pass(name):
            return (self._with_files(make_pass(name, options, where=where), where),)
        pass_type = self._type(name)
        return (make_user_pass(pass_type, checked_config(pass_type.config_type, options, where), where),)

    def _with_files(self, pass_: Pass[Any], where: str) -> Pass[Any]:
        """Return the pass with the files its options name found, from the working directory or beside the recipe."""
        if not isinstance(pass_, Medusa) or pass_.config.from_ is None:
            return pass_
        config: MedusaConfig = pass_.config
        assert config.from_ is not None
        found = local_path(config.from_, self._folder)
        if found is None:
            raise ConfigError("passes", [Fault(f"{where}.from", f"'{config.from_}' is neither a folder nor a file")])
        return Medusa(config.model_copy(update={"from_": str(found)}))

    def _type(self, name: str) -> type[Pass[Any]]:
        if is_user_pass(name):
            return load_user_pass(name, self._folder, taken={*PASSES, FUSE})
        if name not in PASSES:
            raise KeyError(name)
        return PASSES[name]
