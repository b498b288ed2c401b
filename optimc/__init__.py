"""optimc: compile a Hugging Face causal language model into one `engine.plan`, serve it, measure it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # Finding the version takes as long as importing all of optimc that most uses need.
    if name != "__version__":
        raise AttributeError(f"module 'optimc' has no attribute '{name}'")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("optimc")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"
