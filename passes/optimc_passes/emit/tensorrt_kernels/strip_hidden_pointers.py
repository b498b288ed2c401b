"""Takes Triton's hidden arguments off a kernel's PTX, for launchers that pass only the arguments they know of."""

from __future__ import annotations

import re

from optimc.errors import LoweringError
from optimc_passes.emit.tensorrt_kernels.compile_source import HIDDEN_ARGUMENTS

_ENTRY = re.compile(r"(\.visible \.entry (\w+)\()(.*?)(\n\))", re.DOTALL)


def strip_hidden_pointers(ptx: str) -> str:
    """Return `ptx` with the entry's last two parameters removed.

    Raises LoweringError if they are not the pointers Triton is known to append, or if the kernel reads them.
    """
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise LoweringError("Triton's PTX has no entry point where one is expected: it is of an unknown version")
    opening, name, body, closing = entry.groups()
    parameters = body.split(",\n")
    kept, hidden = parameters[: -len(HIDDEN_ARGUMENTS)], parameters[-len(HIDDEN_ARGUMENTS) :]
    for number, parameter in enumerate(hidden, start=len(kept)):
        if not re.fullmatch(rf"\s*\.param \.u64 \.ptr \.global \.align 1 {name}_param_{number}", parameter):
            raise LoweringError(f"{name}: Triton appended '{parameter.strip()}', not one of its two scratch pointers")
        if f"{name}_param_{number}]" in ptx[entry.end() :]:
            raise LoweringError(f"{name} reads the scratch memory Triton appended as its argument {number}")
    return ptx[: entry.start()] + opening + ",\n".join(kept) + closing + ptx[entry.end() :]
