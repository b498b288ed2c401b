"""Times of kernels that earlier builds measured on this GPU: full TensorRT's builds are mostly measuring.

TensorRT-RTX measures nothing when it builds, and wants a GPU as soon as it is handed a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimc.errors import StorageError
from optimc.storage import replacing, storing


def timing_cache_path(folder: Path, version: str, architecture: str) -> Path:
    """Return where times are kept: they hold for one version and one kind of GPU."""
    return folder / "tensorrt" / f"timing-{version}-{architecture}.cache"


def use_timing_cache(config: Any, path: Path) -> None:
    """Let a builder's configuration begin with the times in `path`; with none if TensorRT does not take those.

    Raises StorageError if they cannot be read.
    """
    try:
        kept = config.create_timing_cache(path.read_bytes())
    except FileNotFoundError:
        kept = None
    except OSError as error:
        raise StorageError(
            f"times of kernels cannot be read from {path}: {error.strerror or error}; remove it or make it readable"
        ) from error
    if kept is None or not config.set_timing_cache(kept, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def keep_timing_cache(config: Any, path: Path) -> None:
    """Write the times back, those of this build among them. Raises StorageError."""
    cache = config.get_timing_cache()
    if cache is not None:
        with storing("times of kernels", path), replacing(path) as file:
            file.write(memoryview(cache.serialize()))
