"""Who is next among tenants: the one that has had least, counted in tokens (virtual token counter, 2401.00588).

A tenant is charged for the prompt tokens computed for it when a request is admitted, and for its output as it comes.
Whoever comes back from idleness starts level with the least charged of the active ones: unused time is not saved up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from optimc_runtime.sequence import Sequence
from optimc_runtime.stats import TenantStats

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a token is charged: one of output takes a share of a whole step, one of a prompt a share of a chunk."""


class _Account:
    __slots__ = ("charged", "output_tokens", "prompt_tokens", "unfinished")

    def __init__(self) -> None:
        self.charged = 0
        self.unfinished = 0
        """Requests that wait or run."""
        self.prompt_tokens = 0
        self.output_tokens = 0


class FairShare:
    """One account per tenant there ever was; their number is that of the API keys. With one tenant active it changes
    nothing."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._num_active = 0
        self._level = 0
        """What the least charged of the active tenants had been charged when that was last looked at; never falls."""

    @property
    def is_contended(self) -> bool:
        """Whether more than one tenant has unfinished requests."""
        return self._num_active > 1

    def enter(self, sequence: Sequence) -> None:
        """A request has come."""
        account = self._accounts.setdefault(sequence.tenant, _Account())
        if not account.unfinished:
            self._raise_level()
            account.charged = max(account.charged, self._level)
            self._num_active += 1
        account.unfinished += 1

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        """Charge the prompt of a request that is admitted, but for what was found cached; once only."""
        if sequence.num_preemptions == 0:
            account = self._accounts[sequence.tenant]
            account.charged += PROMPT_WEIGHT * (sequence.num_prompt - num_cached)
            account.prompt_tokens += sequence.num_prompt

    def charge_output(self, sequences: Iterable[Sequence]) -> None:
        """Charge what running requests have been given since this was last done."""
        for sequence in sequences:
            account = self._accounts[sequence.tenant]
            fresh = sequence.num_output - sequence.num_charged
            account.charged += OUTPUT_WEIGHT * fresh
            account.output_tokens += fresh
            sequence.num_charged += fresh

    def leave(self, sequence: Sequence) -> None:
        """A request has ended."""
        self.charge_output((sequence,))
        account = self._accounts[sequence.tenant]
        assert account.unfinished > 0
        if account.unfinished == 1:
            self._raise_level()
            self._num_active -= 1
        account.unfinished -= 1

    def order(self, waiting: list[Sequence]) -> Iterable[Sequence]:
        """Return those that wait, given by rank, in the order of admission: preempted ones as they stand, then each
        time the next one of the tenant charged least, were all before it admitted."""
        return self._in_turns(waiting) if self.is_contended else tuple(waiting)

    def stats(self, running: list[Sequence], waiting: list[Sequence]) -> dict[str, TenantStats]:
        """Return what each tenant with a name has and had; from any thread."""
        accounts = {name: account for name, account in tuple(self._accounts.items()) if name}
        if not accounts:
            return {}
        runs: Counter[str] = Counter()
        uncharged: Counter[str] = Counter()
        for sequence in tuple(running):
            runs[sequence.tenant] += 1
            uncharged[sequence.tenant] += sequence.num_output - sequence.num_charged
        waits = Counter([sequence.tenant for sequence in tuple(waiting)])
        return {
            name: TenantStats(runs[name], waits[name], each.prompt_tokens, each.output_tokens + uncharged[name])
            for name, each in accounts.items()
        }

    def _in_turns(self, waiting: list[Sequence]) -> Iterator[Sequence]:
        queues: dict[str, deque[Sequence]] = {}
        preempted: list[Sequence] = []
        for sequence in waiting:
            if sequence.num_preemptions:
                preempted.append(sequence)
            else:
                queues.setdefault(sequence.tenant, deque()).append(sequence)
        yield from preempted
        # Among equally charged ones, whose first request stands first.
        heap = [(self._accounts[tenant].charged, place, tenant) for place, tenant in enumerate(queues)]
        heapify(heap)
        while heap:
            charged, place, tenant = heappop(heap)
            sequence = queues[tenant].popleft()
            yield sequence
            if queues[tenant]:
                heappush(heap, (charged + PROMPT_WEIGHT * sequence.num_prompt, place, tenant))

    def _raise_level(self) -> None:
        active = [each.charged for each in self._accounts.values() if each.unfinished]
        if active:
            self._level = max(self._level, min(active))
