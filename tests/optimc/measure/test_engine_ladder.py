"""The closed loop that begins a ladder has no more clients than the engine runs at once."""

from types import SimpleNamespace

import pytest

from optimc.measure.engine_ladder import MOST_CLIENTS, climb_ladder
from optimc.measure.load.slo import Slo
from optimc.measure.workload import Workload


class Sent(Exception):
    pass


@pytest.mark.parametrize(("max_seqs", "clients"), [(4, 4), (64, MOST_CLIENTS)])
def test_clients_are_at_most_the_engines_own_sequences(max_seqs, clients):
    # Started with fewer than its plan allows: the plan's limits are no measure.
    engine = SimpleNamespace(max_seqs=max_seqs)

    def bench(workload):
        assert (workload.arrival, workload.concurrency) == ("closed", clients)
        raise Sent

    with pytest.raises(Sent):
        climb_ladder(engine, bench, Workload(slo=Slo(ttft_ms=500)), attain=0.95)
