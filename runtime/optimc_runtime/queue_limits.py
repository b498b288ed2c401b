"""Who is refused because too much is waiting: better at once, and told when to come back, than late."""

from __future__ import annotations

from collections.abc import Iterable

from optimc.errors import OverloadedError
from optimc_runtime.config import EngineConfig
from optimc_runtime.scheduler import Scheduler
from optimc_runtime.sequence import Sequence
from optimc_runtime.wait_forecast import WaitForecast

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0


class QueueLimits:
    """Bounds of the queue, by requests, by tokens and, with `ttft_slo_s`, by the time to the first token.

    A tenant with a name may hold half of the queue, so that nobody's flood leaves no place for others. The scheduler is
    read while its own thread changes it: a step more or less makes no difference here.
    """

    def __init__(self, config: EngineConfig, scheduler: Scheduler, forecast: WaitForecast) -> None:
        self._config = config
        self._scheduler = scheduler
        self._forecast = forecast

    def check(self, newcomer: Sequence, inbox: Iterable[Sequence]) -> None:
        """Raise OverloadedError if `newcomer` is one too many behind those that wait and those of `inbox`."""
        config = self._config
        waiting = [*tuple(self._scheduler.waiting), *inbox]
        could_run = self._scheduler.limits.max_running - len(self._scheduler.running)
        self._check_places(len(waiting), could_run, config.max_queued_requests, "")
        self._check_tokens(waiting, newcomer, config.max_queued_tokens, "")
        if newcomer.tenant:
            own = [each for each in waiting if each.tenant == newcomer.tenant]
            holder = f" of key '{newcomer.tenant}'"
            self._check_places(len(own), could_run, tenant_share(config.max_queued_requests), holder)
            self._check_tokens(own, newcomer, tenant_share(config.max_queued_tokens), holder)
        if config.ttft_slo_s is not None and not newcomer.is_follower:
            self._check_wait(newcomer, waiting, could_run, config.ttft_slo_s)

    def _check_places(self, waiting: int, could_run: int, most: int, holder: str) -> None:
        excess = waiting - could_run - most + 1
        if excess > 0:
            retry_s = self._forecast.turnover_s(excess, self._scheduler.limits.max_running)
            raise OverloadedError(
                f"{waiting} requests{holder} are waiting, {most} may beyond what can run; try again later",
                _bounded(retry_s),
            )

    def _check_tokens(self, waiting: list[Sequence], newcomer: Sequence, most: int, holder: str) -> None:
        tokens = sum([each.num_tokens for each in waiting])
        excess = tokens + newcomer.num_prompt - most
        if waiting and excess > 0:
            raise OverloadedError(
                f"{tokens:,} prompt tokens{holder} are waiting; {newcomer.num_prompt:,} more would exceed {most:,}; "
                "try again later",
                _bounded(self._forecast.prefill_s(excess) or 0.0),
            )

    def _check_wait(self, newcomer: Sequence, waiting: list[Sequence], could_run: int, limit_s: float) -> None:
        started = sum([max(0, each.num_tokens - each.num_computed - 1) for each in tuple(self._scheduler.running)])
        if not waiting and not started and could_run:
            return  # it would be no faster later, and only steps correct the forecast
        tokens, requests = _ahead(newcomer, waiting)
        wait_s = self._forecast.first_token_s(
            tokens + started,
            requests,
            newcomer.num_prompt,
            could_run=could_run,
            max_running=self._scheduler.limits.max_running,
        )
        if wait_s is not None and wait_s > limit_s:
            raise OverloadedError(
                f"the first token would take about {wait_s:.2g} s, the limit is {limit_s:.2g} s; try again later",
                _bounded(wait_s - limit_s),
            )


def _ahead(newcomer: Sequence, waiting: list[Sequence]) -> tuple[int, int]:
    """Return the tokens and the number of those that wait and will come before `newcomer`: of each other tenant no more
    than of its own, since tenants take turns."""
    tokens: dict[str, int] = {newcomer.tenant: newcomer.num_prompt}
    requests: dict[str, int] = {newcomer.tenant: 1}
    for each in waiting:
        tokens[each.tenant] = tokens.get(each.tenant, 0) + each.num_tokens
        requests[each.tenant] = requests.get(each.tenant, 0) + 1
    own_tokens, own_requests = tokens[newcomer.tenant], requests[newcomer.tenant]
    ahead_tokens = sum([min(count, own_tokens) for count in tokens.values()]) - newcomer.num_prompt
    ahead_requests = sum([min(count, own_requests) for count in requests.values()]) - 1
    return ahead_tokens, ahead_requests


def tenant_share(most: int) -> int:
    """Return how much of a queue of `most` a tenant with a name may hold."""
    return -(-most // 2)


def _bounded(retry_s: float) -> float:
    return min(max(retry_s, LEAST_RETRY_S), MOST_RETRY_S)
