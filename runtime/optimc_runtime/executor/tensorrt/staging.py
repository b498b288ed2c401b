"""From host to device: one region there, two page-locked buffers here.

The host fills one buffer while the other is still being copied. The region on the device is one and stays where it is,
since captured graphs hold its address; the stream's order keeps the next copy behind the work that reads the last.
"""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from optimc_runtime.executor.tensorrt.cuda import CudaDevice


class Staging:
    """Room for `nbytes` on their way."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, self._turn = device, 0
        with ExitStack() as resources:
            self.address = device.allocate(nbytes)
            """Where `send` copies to."""
            resources.callback(device.free, self.address)
            self._buffers = []
            self._copied = []
            for _ in range(2):
                buffer = device.host_buffer(nbytes)
                resources.callback(device.release_host, buffer)
                self._buffers.append(buffer)
                event = device.event()
                resources.callback(event.close)
                self._copied.append(event)
            self._resources = resources.pop_all()

    def take(self) -> NDArray[np.uint8]:
        """Return a buffer uint8 [nbytes] to be filled, after its last contents have been copied."""
        self._copied[self._turn].wait()
        return self._buffers[self._turn]

    def send(self, nbytes: int) -> None:
        """Enqueue copying the first bytes of the buffer that was taken last to `address`."""
        self._device.upload(self.address, self._buffers[self._turn][:nbytes])
        self._copied[self._turn].record()
        self._turn = 1 - self._turn

    def close(self) -> None:
        """Free everything."""
        self._resources.close()
