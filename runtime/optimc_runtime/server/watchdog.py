"""Tells the log when the engine stands still: a probe that nobody polls would not."""

from __future__ import annotations

import asyncio
import logging
import math

from optimc_runtime.server.context import ServerContext
from optimc_runtime.server.log_event import LogEvent

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


async def watch(context: ServerContext, *, interval_s: float = INTERVAL_S) -> None:
    """Log one error per stall, and its end. Runs until it is cancelled."""
    is_reported = False
    while True:
        await asyncio.sleep(interval_s)
        stalled_s = context.engine.stalled_s()
        if stalled_s <= context.options.stall_threshold_s:
            if is_reported:
                logger.warning(LogEvent("moving_again", {}))
            is_reported = False
        elif not is_reported:
            is_reported = True
            logger.error(_report(context, stalled_s))


def _report(context: ServerContext, stalled_s: float) -> LogEvent:
    if math.isinf(stalled_s):
        return LogEvent("engine_broken", {"detail": "the engine's loop failed; restart the server"})
    stats = context.engine.stats()
    return LogEvent(
        "stalled",
        {
            "seconds": round(stalled_s, 1),
            "running": stats.running,
            "waiting": stats.waiting,
            "steps": stats.steps,
            "last_step_s": round(stats.last_step_s, 6),
        },
    )
