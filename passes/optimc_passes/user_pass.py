"""Passes that a recipe names as `module:Class`: Python code of its author, held to the same contract as ours."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Container
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from optimc.errors import ConfigError, Fault
from optimc.wording import raised, source_file
from optimc_passes.base import Pass, PassConfig
from optimc_passes.pass_contract import contract_faults


def is_user_pass(name: str) -> bool:
    """Whether a name in a recipe means a user's pass."""
    return ":" in name


def load_user_pass(spec: str, folder: Path, taken: Container[str] = ()) -> type[Pass[Any]]:
    """Import `module:Class` and check it; the class returned knows the SHA-256 of file and class (`source_digest`).

    `package.module` is the file package/module.py in the recipe's `folder` if there is one, else whatever Python
    imports by that name. A file beside the recipe is imported as it stands: it sees installed packages, not its
    neighbours. Raises ConfigError with all faults at once. `taken` are names of passes it must not claim.
    """
    module_name, _, class_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), class_name]):
        raise _refused(spec, ["write it as module:Class, for example my_passes:DropThings"])
    path = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    try:
        module = _from_file(path) if path.is_file() else importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the author's code raises
        where = str(path) if path.is_file() else f"neither {path} nor an installed module: {module_name}"
        raise _refused(spec, [f"{where} cannot be imported: {raised(error, str(path.absolute()))}"]) from error
    found = getattr(module, class_name, None)
    if found is None:
        offered = sorted(name for name, entry in vars(module).items() if _is_pass_of(module, entry))
        raise _refused(spec, [f"{module_name} has no {class_name}; its passes: {', '.join(offered) or 'none'}"])
    faults = contract_faults(found)
    if isinstance(getattr(found, "name", None), str) and found.name in taken:
        faults.append(f"name '{found.name}' is that of a pass of ours; choose another")
    if faults:
        raise _refused(spec, [f"{class_name} {fault}" for fault in faults])
    # A class of its own, so that what was imported stays what its author wrote.
    digest = _digest(module, class_name)
    attributes = {"source_digest": digest, "__doc__": found.__doc__, "__module__": found.__module__}
    try:
        loaded: type[Pass[Any]] = type(class_name, (found,), attributes)
    except Exception as error:
        raise _refused(spec, [f"{class_name} cannot be derived from: {raised(error, str(path.absolute()))}"]) from error
    return loaded


def make_user_pass(pass_type: type[Pass[Any]], config: PassConfig, place: str) -> Pass[Any]:
    """Return the pass with its options. Raises ConfigError if its class or the options' cannot be used so."""
    try:
        made = pass_type(config)
        json.dumps(made.describe_config())
    except Exception as error:  # whatever the author's code raises
        what = raised(error, source_file(pass_type))
        message = f"{pass_type.__name__} cannot be made with its options: {what}"
        raise ConfigError("passes", [Fault(place, message)]) from error
    return made


def _from_file(path: Path) -> ModuleType:
    """Import a file under a name of its own; once per contents, so that its classes are the same each time."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"optimc_user_passes.{path.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # pydantic looks up annotations there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _digest(module: ModuleType, class_name: str) -> str:
    file = getattr(module, "__file__", None)
    contents = Path(file).read_bytes() if file else module.__name__.encode()
    # The class counts too: two in one file may have one name.
    return hashlib.sha256(hashlib.sha256(contents).digest() + class_name.encode()).hexdigest()


def _is_pass_of(module: ModuleType, entry: object) -> bool:
    return (
        isinstance(entry, type)
        and issubclass(entry, Pass)
        and not inspect.isabstract(entry)
        and entry.__module__ == module.__name__
    )


def _refused(spec: str, messages: list[str]) -> ConfigError:
    return ConfigError("passes", [Fault(spec, message) for message in messages])
