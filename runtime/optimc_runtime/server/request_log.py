"""One line per HTTP request, written when its last byte has gone out."""

from __future__ import annotations

import logging
import time

from optimc_runtime.server.log_event import LogEvent
from optimc_runtime.server.request_record import RequestRecord

logger = logging.getLogger("optimc.requests")


def log_request(record: RequestRecord, status: int, *, level: int = logging.INFO) -> None:
    """Log how a request ended. `total_s` is from its headers to its last byte, the client's own slowness included."""
    if logger.isEnabledFor(level):
        total_s = round(time.monotonic() - record.arrived_s, 6)
        logger.log(level, LogEvent("request", {**record.fields(), "status": status, "total_s": total_s}))
