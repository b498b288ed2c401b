"""`GET /dashboard.json`: the figures the page shows, in one answer a second."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from optimc_runtime.server.context import ServerContext


async def dashboard(context: ServerContext, _request: Request) -> Response:
    """Answer what is served and how busy it is; totals are since the start, `time_s` is a clock to divide them by."""
    stats = context.engine.stats()
    return JSONResponse(
        {
            "model": context.model_name,
            "has_chat": context.chat_template is not None,
            "max_model_len": context.engine.max_seq_len,
            "time_s": time.monotonic(),
            "running": stats.running,
            "waiting": stats.waiting,
            "waiting_tokens": stats.waiting_tokens,
            "refused": stats.refused,
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "output_tokens": stats.output_tokens,
            "blocks_total": stats.blocks_total,
            "cached_blocks": stats.prefix_cached_blocks,
            "pinned_blocks": stats.pinned_blocks,
            "kv_usage": stats.kv_usage,
            "prefix_hit_rate": stats.prefix_hit_rate,
            "tenants": {
                name: {
                    "running": tenant.running,
                    "waiting": tenant.waiting,
                    "prompt_tokens": tenant.prompt_tokens,
                    "output_tokens": tenant.output_tokens,
                }
                for name, tenant in stats.tenants.items()
            },
        },
        headers={"Cache-Control": "no-store"},
    )
