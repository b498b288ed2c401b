"""How much of the memory a build may use is still free."""

from __future__ import annotations

from dataclasses import dataclass, field

from optimc_passes.memory import resident_bytes


@dataclass
class Budget:
    """What is left of a limit on the process's resident size, in bytes. `max_host_bytes` None: there is no limit."""

    max_host_bytes: int | None
    resident_now: int
    """What the process holds before anything is reserved here."""
    reserved: int = field(default=0, init=False)

    @classmethod
    def of_process(cls, max_host_bytes: int | None, *, needed: int = 0) -> Budget:
        """Return the budget of this process as it is now, with `needed` bytes set apart for other work."""
        return cls(max_host_bytes, resident_bytes() + needed)

    def take(self, nbytes: int) -> bool:
        """Reserve `nbytes` if they fit, and say whether they did."""
        if self.max_host_bytes is not None and self.resident_now + self.reserved + nbytes > self.max_host_bytes:
            return False
        self.reserved += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Release what `take` reserved."""
        assert 0 <= nbytes <= self.reserved, (nbytes, self.reserved)
        self.reserved -= nbytes
