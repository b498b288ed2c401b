"""The engine options under which something was measured: figures of other options are other figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from optimc_runtime.config import EngineConfig, SpeculationOptions


@dataclass(frozen=True, slots=True)
class EngineSwitches:
    """How the engine is run that is measured; the defaults are everything on, but nothing guessed ahead."""

    prefix_cache: bool = True
    chunked_prefill: bool = True
    inflight_batching: bool = True
    """Off is static batching."""
    speculation: str = "off"
    """As `--speculation` takes it."""
    threads: int | None = None
    """Compute threads; None lets the executor choose."""
    max_seqs: int | None = None
    """Most sequences in a step; None as the plan has it, as below."""
    max_step_tokens: int | None = None

    def to_engine_config(self) -> EngineConfig:
        """Return the engine's options. Prompts are not cut by the clock: what is computed must not depend on time.

        Raises ConfigError for values the engine refuses.
        """
        return EngineConfig(
            prefix_cache=self.prefix_cache,
            chunked_prefill=self.chunked_prefill,
            inflight_batching=self.inflight_batching,
            speculation=SpeculationOptions.parse(self.speculation),
            threads=self.threads,
            max_seqs=self.max_seqs,
            max_step_tokens=self.max_step_tokens,
            gap_factor=0.0,
        )

    def turned_off(self, name: str) -> EngineSwitches:
        """Return the same but for one switch: prefix_cache, chunked_prefill, inflight_batching or speculation."""
        off: dict[str, Any] = {"prefix_cache": False, "chunked_prefill": False, "inflight_batching": False}
        off["speculation"] = "off"
        if name not in off:
            raise ValueError(f"'{name}' is no switch; known: {', '.join(off)}")
        return replace(self, **{name: off[name]})

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)
