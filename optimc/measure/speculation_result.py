"""What guessing ahead gained, as data, as JSON and as lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimc_runtime.stats import ProposerStats


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """An engine with and without speculation, in turns."""

    mode: str
    proposers: Mapping[str, ProposerStats]
    acceptance_by_position: tuple[float, ...]
    """By distance 1, 2, ..: share of guesses accepted, among those whose predecessors were."""
    tokens_per_step: float
    """Per decoding sequence."""
    draft_s_per_step: float
    costs: tuple[tuple[int, float], ...]
    """(rows, seconds of a step) at the measured batch."""
    predicted_speedup: float
    """Tokens per step over what steps and guesses take more than plain steps, by the cost model."""
    break_even_batch: int | None
    """Sequences from which on guesses accepted like these do not pay; None: not known to end."""
    plain_tokens_per_s: float
    """Tokens per second of all clients together once their answers have begun: what decoding makes, prefill apart."""
    speculative_tokens_per_s: float
    """The same with speculation."""

    @property
    def observed_speedup(self) -> float:
        """Decoding with over decoding without."""
        return self.speculative_tokens_per_s / self.plain_tokens_per_s if self.plain_tokens_per_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return every figure."""
        return {
            "mode": self.mode,
            "proposers": {
                name: {
                    "drafted": figures.drafted,
                    "accepted": figures.accepted,
                    "trees": figures.trees,
                    "acceptance": figures.accepted / figures.drafted if figures.drafted else None,
                }
                for name, figures in self.proposers.items()
            },
            "acceptance_by_position": list(self.acceptance_by_position),
            "tokens_per_step": self.tokens_per_step,
            "draft_ms_per_step": self.draft_s_per_step * 1e3,
            "costs_ms": {str(rows): seconds * 1e3 for rows, seconds in self.costs},
            "predicted_speedup": self.predicted_speedup,
            "observed_speedup": self.observed_speedup,
            "break_even_batch": self.break_even_batch,
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "speculative_tokens_per_s": self.speculative_tokens_per_s,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SpeculationResult:
        """Read what `to_json` gave."""
        return cls(
            mode=data["mode"],
            proposers={
                name: ProposerStats(figures["drafted"], figures["accepted"], figures["trees"])
                for name, figures in data["proposers"].items()
            },
            acceptance_by_position=tuple(data["acceptance_by_position"]),
            tokens_per_step=data["tokens_per_step"],
            draft_s_per_step=data["draft_ms_per_step"] / 1e3,
            costs=tuple((int(rows), ms / 1e3) for rows, ms in data["costs_ms"].items()),
            predicted_speedup=data["predicted_speedup"],
            break_even_batch=data["break_even_batch"],
            plain_tokens_per_s=data["plain_tokens_per_s"],
            speculative_tokens_per_s=data["speculative_tokens_per_s"],
        )

    def lines(self) -> list[tuple[str, str]]:
        """Return (name, value) for the report in a terminal."""
        proposers = ", ".join(
            f"{name} {figures.accepted:,} of {figures.drafted:,} guesses accepted"
            for name, figures in self.proposers.items()
        )
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_by_position)
        costs = ", ".join(f"{rows} rows {seconds * 1e3:.2f}" for rows, seconds in self.costs)
        ends = "not reached" if self.break_even_batch is None else f"batch {self.break_even_batch}"
        return [
            (f"speculation {self.mode}", f"{self.observed_speedup:.2f}x ({self.predicted_speedup:.2f}x predicted)"),
            (
                "  with and without",
                f"{self.speculative_tokens_per_s:,.1f} and {self.plain_tokens_per_s:,.1f} tokens/s decoding",
            ),
            ("  tokens per step", f"{self.tokens_per_step:.2f}; guessing {self.draft_s_per_step * 1e3:.3f} ms"),
            ("  guesses", proposers),
            ("  by position", rates or "none tried"),
            ("  ms per step", costs),
            ("  pays no more from", ends),
        ]
