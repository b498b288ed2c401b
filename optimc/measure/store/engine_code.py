"""Which engine measured: its code, not its version alone, for a change of either changes figures."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import optimc_runtime
from optimc_runtime import _native


@cache
def engine_code() -> str:
    """Return the instruction set that kernels are run with, and twelve hex digits of all files of the runtime."""
    assert optimc_runtime.__file__ is not None
    assert _native.__file__ is not None
    root = Path(optimc_runtime.__file__).parent
    digest = hashlib.sha256(Path(_native.__file__).read_bytes())
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return f"{_native.default_instruction_set()} {digest.hexdigest()[:12]}"
