"""Sending one call, the same way in both loops: its time limit, and what makes it a failure."""

from __future__ import annotations

import asyncio

from optimc.measure.driver import Clock, Driver
from optimc.measure.exchange import Exchange
from optimc.measure.prompts import Prompt


async def send(
    driver: Driver, prompt: Prompt, output_tokens: int, exchange: Exchange, clock: Clock, timeout_s: float
) -> None:
    """Send a prompt and fill in the exchange. An answer without a token has failed, and so has one that takes longer
    than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await driver.send(prompt, output_tokens, exchange)
    except TimeoutError:
        exchange.fail(f"timed out after {timeout_s:g} s", clock())
        return
    if exchange.failure is None and exchange.output_tokens == 0:
        exchange.fail("empty output", clock())
