"""How the HTTP front end behaves, fixed when the server starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from optimc.errors import ConfigError, Fault, RequestError
from optimc_runtime.request import SamplingParams
from optimc_runtime.server.protocol.generation import DEFAULTABLE
from optimc_runtime.server.traffic_log import TrafficLog


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and policies of one server. Raises ConfigError listing every generation default that is not usable."""

    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body; more is refused with 413."""
    body_timeout_s: float = 30.0
    """A body that is not complete after this is refused with 408."""
    max_choices: int = 128
    """Most answers one HTTP request may ask for: prompts times `n`."""
    allow_unknown_fields: bool = False
    """Log fields we do not know instead of refusing them. Fields we know and cannot honour are refused regardless."""
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Sampling values for requests that do not give their own."""
    stall_threshold_s: float = 30.0
    """`/health` turns 503 when the engine has had work but made no step for this long."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused with 400; None leaves it to the engine."""
    max_output_tokens: int | None = None
    """Most output tokens a choice may ask for, and what it gets if it asks for none. None leaves it to the engine."""
    request_timeout_s: float = 600.0
    """A request that is not answered after this is given up: 504, or an error event in a stream."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server; "*" lets all. None: no CORS header is ever sent."""
    show_page: bool = True
    """Serve the page at `/`."""
    traffic_log: TrafficLog | None = None
    """Where what is asked is written down, text included; whoever opened it closes it."""

    def __post_init__(self) -> None:
        faults = [
            Fault(name, f"no generation default; known: {', '.join(sorted(DEFAULTABLE))}")
            for name in sorted(set(self.generation_defaults) - set(DEFAULTABLE))
        ]
        for name in sorted(set(self.generation_defaults) & set(DEFAULTABLE)):
            try:
                SamplingParams(**{name: self.generation_defaults[name]})  # type: ignore[arg-type]  # any field
            except RequestError as error:
                faults.append(Fault(name, str(error)))
        if faults:
            raise ConfigError("generation defaults", faults)
