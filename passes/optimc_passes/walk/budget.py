"""How much of the memory a build may use is still free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Budget:
    """What is left of a limit on the process's resident size, in bytes; `max_host_bytes` None: no limit."""

    max_host_bytes: int | None
    resident_now: int

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes` if they fit, and say whether they did."""
        raise NotImplementedError

    def give_back(self, nbytes: int) -> None:
        """Release what `take` reserved."""
        raise NotImplementedError
