"""Where TensorRT streams an engine to while it serializes it, so that memory does not hold it twice."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, BinaryIO


@cache
def writer_class(trt: ModuleType) -> Any:
    """Return the class for one TensorRT module. Its objects take a binary file and append to it."""

    class EngineWriter(trt.IStreamWriter):  # type: ignore[name-defined, misc]
        """Appends to a file. An exception must not pass through TensorRT, so it is kept as `failure`."""

        def __init__(self, file: BinaryIO) -> None:
            trt.IStreamWriter.__init__(self)
            self.failure: OSError | None = None
            self._file = file

        def write(self, data: Any) -> int:
            """Return the number of bytes taken; called by TensorRT."""
            try:
                return self._file.write(data)
            except OSError as error:
                self.failure = error
                return 0

    return EngineWriter
