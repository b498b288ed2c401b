"""What a build starts from, gathered and checked before any work: recipe, model, passes, places."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimc.build.references import check_references, find_model
from optimc.errors import ConfigError, Fault, MissingExtraError
from optimc.plan import looks_like_a_plan
from optimc.recipe import Recipe, load_recipe
from optimc.recipe.model import PassConfigs
from optimc.storage import cache_folder, why_not_writable

if TYPE_CHECKING:
    from optimc_passes.base import Pass

_COMPILER_MODULES = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "onnxruntime",
    "safetensors",
    "ml_dtypes",
)


@dataclass(frozen=True)
class BuildOptions:
    """How a recipe is built; apart from `overrides`, nothing here changes the plan's bytes."""

    output: Path | None = None
    """Plan to write; `RECIPE-NAME.plan` in `output_dir` if None."""
    output_dir: Path = Path()
    overrides: tuple[str, ...] = ()
    """`path=value` changes to the recipe."""
    cache_dir: Path | None = None
    """Where results of passes are kept; $OPTIMC_CACHE, else .optimc-cache in the working directory, if None."""
    fresh: bool = False
    """Ignore the cache and any plan that is up to date."""
    dump_graph: Path | None = None
    """Folder that receives the graph after each phase."""
    max_host_bytes: int | None = None
    """Most memory the build may have resident; None: no limit."""

    @property
    def cache(self) -> Path:
        """The cache folder in force."""
        return cache_folder(self.cache_dir)


@dataclass(frozen=True)
class BuildInputs:
    """A checked recipe and what it refers to."""

    recipe: Recipe
    recipe_path: Path
    model: str
    """The recipe's model, with a local path found."""
    passes: tuple[Pass[Any], ...]
    output: Path


def require_compiler(purpose: str) -> None:
    """Raise MissingExtraError if a package of the extra `build` is not installed; `purpose` is what needs it."""
    for module in _COMPILER_MODULES:
        if find_spec(module) is None:
            raise MissingExtraError(module, "build", purpose)


def pass_configs() -> PassConfigs:
    """Return the name and configuration of everything a recipe may write under `passes`, a user's passes apart."""
    from optimc.build.pass_catalog import PassCatalog

    return PassCatalog(Path())


def read_inputs(recipe_path: Path, options: BuildOptions) -> BuildInputs:
    """Load the recipe and everything that can be checked without the model.

    Raises MissingExtraError without the compiler's packages, ConfigError with all faults at once: in the recipe
    and in what it refers to.
    """
    require_compiler("building a plan")
    from optimc.build.pass_catalog import PassCatalog

    catalog = PassCatalog(recipe_path.parent)
    recipe = load_recipe(
        recipe_path,
        pass_configs=catalog,
        overrides=options.overrides,
        check=lambda data: check_references(data, recipe_path, catalog),
    )
    passes = tuple(
        pass_
        for index, spec in enumerate(recipe.passes)
        for pass_ in catalog.make(spec.name, spec.options, f"passes[{index}]")
    )
    model = find_model(recipe.model.source, recipe_path)
    assert model is not None, "check_references has found it"
    output = options.output or options.output_dir / f"{recipe.name}.plan"
    faults = _check_places(output, options)
    if faults:
        raise ConfigError("options", faults)
    return BuildInputs(recipe, recipe_path, model, passes, output)


def _check_places(output: Path, options: BuildOptions) -> list[Fault]:
    """Return what keeps the build from writing where it is told to. A build may take hours; it must not end so."""
    faults = []
    try:
        output.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        faults.append(Fault("--output", f"{output}: {error.strerror or error}"))
    else:
        if output.is_dir():
            faults.append(Fault("--output", f"{output} is a folder; name a file"))
        elif not looks_like_a_plan(output):
            faults.append(
                Fault("--output", f"{output} exists and is not an engine.plan; name another file or remove it")
            )
    places = {"--output": output.parent, "--cache-dir": options.cache, "--dump-graph": options.dump_graph}
    for option, folder in places.items():
        reason = why_not_writable(folder) if folder is not None else None
        if reason is not None:
            faults.append(Fault(option, reason))
    return faults
