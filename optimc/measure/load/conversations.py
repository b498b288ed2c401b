"""The course of conversations: a later turn carries what was really answered before."""

from __future__ import annotations

import asyncio

from optimc.measure.exchange import Exchange
from optimc.measure.load.dataset import Call
from optimc.measure.prompts import ChatPrompt, Prompt


class Conversations:
    """Knows how each turn ended, and makes the next one's prompt of it."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, int], asyncio.Future[Prompt | None]] = {}

    def open(self, call: Call) -> None:
        """Note that a turn is under way; before its successor asks."""
        if call.conversation is not None:
            self._turns[call.conversation, call.turn] = asyncio.get_running_loop().create_future()

    async def prompt_of(self, call: Call) -> Prompt | None:
        """Return the whole prompt of an opened turn, once the one before has ended; None if that failed, and this one
        cannot be sent."""
        if call.conversation is None or call.turn == 0:
            return call.prompt
        before = await self._turns[call.conversation, call.turn - 1]
        del self._turns[call.conversation, call.turn - 1]  # not sooner: `end` must find it
        return None if before is None else _joined(before, call.prompt)

    def end(self, call: Call, prompt: Prompt | None, exchange: Exchange | None) -> None:
        """Note how a turn ended: with its answer, or without (a failure, or not sent)."""
        if call.conversation is None:
            return
        turn = self._turns.get((call.conversation, call.turn))
        if turn is None or turn.done():
            return
        answered = prompt is not None and exchange is not None and exchange.succeeded
        turn.set_result(_answered(prompt, exchange) if answered and prompt and exchange else None)


def _answered(prompt: Prompt, exchange: Exchange) -> Prompt:
    """Return prompt and answer."""
    if isinstance(prompt, list):
        return [*prompt, *exchange.answer_ids]
    text = "".join(exchange.answer_texts)
    if isinstance(prompt, str):
        return prompt + text
    return ChatPrompt((*prompt.messages, {"role": "assistant", "content": text}), prompt.tools)


def _joined(before: Prompt, said: Prompt) -> Prompt:
    """Return what was said and answered so far, and what the user says now."""
    if isinstance(before, list) and isinstance(said, list):
        return [*before, *said]
    if isinstance(before, str) and isinstance(said, str):
        return before + said
    assert isinstance(before, ChatPrompt)
    assert isinstance(said, str)
    return ChatPrompt((*before.messages, {"role": "user", "content": said.strip()}), before.tools)
