"""optimc: compile a Hugging Face causal language model into one `engine.plan`, serve it, measure it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("optimc")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
