"""The mailbox loses nothing, keeps the order, and wakes the loop no more often than it must."""

import asyncio
import threading
import time

from optimc_runtime.request import RequestId, RequestOutput, Timings, Usage
from optimc_runtime.server.mailbox import Mailbox


def output(number: int) -> RequestOutput:
    return RequestOutput(RequestId("r"), (number,), "", None, None, Usage(1, number, 0), Timings(0.0))


class Wakes:
    """Counts how often the loop looks."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.count = 0
        look = mailbox._deliver_all

        def counted() -> None:
            self.count += 1
            look()

        mailbox._deliver_all = counted  # type: ignore[method-assign]


def test_outputs_posted_together_wake_the_loop_once_and_arrive_in_order():
    async def run() -> None:
        mailbox = Mailbox()
        wakes = Wakes(mailbox)
        mailbox.open()
        arrived: list[tuple[int, int]] = []
        for number in range(100):
            mailbox.post(
                lambda index, output: arrived.append((index, output.token_ids[0])),
                number % 3,
                output(number),
                wake=True,
            )
        assert arrived == [], "posting delivers nothing by itself"
        while len(arrived) < 100:
            await asyncio.sleep(0.001)
        assert arrived == [(number % 3, number) for number in range(100)]
        assert wakes.count == 1

    asyncio.run(run())


def test_what_wakes_nobody_comes_with_what_does():
    async def run() -> None:
        mailbox = Mailbox()
        mailbox.open()
        arrived: list[int] = []
        for number in range(3):
            mailbox.post(lambda _, output: arrived.append(output.token_ids[0]), 0, output(number), wake=False)
        await asyncio.sleep(0.02)
        assert arrived == []
        mailbox.post(lambda _, output: arrived.append(output.token_ids[0]), 0, output(3), wake=True)
        while len(arrived) < 4:
            await asyncio.sleep(0.001)
        assert arrived == [0, 1, 2, 3]

    asyncio.run(run())


def test_nothing_is_lost_between_a_busy_engine_and_a_busy_loop():
    """The races that matter: posts that come just before, while and just after the loop looks."""
    many = 20_000

    async def run() -> None:
        mailbox = Mailbox()
        mailbox.open()
        arrived: list[int] = []
        done = asyncio.Event()

        def deliver(_: int, output: RequestOutput) -> None:
            arrived.append(output.token_ids[0])
            if len(arrived) == many:
                done.set()

        def engine() -> None:
            for number in range(many):
                mailbox.post(deliver, 0, output(number), wake=True)
                if number % 64 == 0:
                    time.sleep(0)

        thread = threading.Thread(target=engine)
        thread.start()
        await asyncio.wait_for(done.wait(), 60)
        thread.join()
        assert arrived == list(range(many))

    asyncio.run(run())


def test_a_mailbox_serves_one_loop_after_another():
    mailbox = Mailbox()

    async def run() -> list[int]:
        mailbox.open()
        arrived: list[int] = []
        mailbox.post(lambda _, output: arrived.append(output.token_ids[0]), 0, output(5), wake=True)
        while not arrived:
            await asyncio.sleep(0.001)
        return arrived

    assert [asyncio.run(asyncio.wait_for(run(), 10)) for _ in range(2)] == [[5], [5]]


def test_posting_to_a_loop_that_is_gone_does_no_harm():
    mailbox = Mailbox()

    async def run() -> None:
        mailbox.open()

    asyncio.run(run())
    for number in range(3):
        mailbox.post(lambda _, output: None, 0, output(number), wake=True)
