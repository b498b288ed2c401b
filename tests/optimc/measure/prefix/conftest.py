"""The generator of traffic, for the tests beside it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def traffic() -> ModuleType:
    """Return the module traffic_generator: test folders are no packages, so it is loaded by its path."""
    name = "optimc_tests_traffic_generator"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("traffic_generator.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]
