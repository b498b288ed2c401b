import shutil

import pytest
from peer.machine_probe import MachineProbe


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_probe_finds_figures_a_machine_can_have():
    state = MachineProbe()()
    assert 1 < state.barrier_ns < 1e9
    assert 0.01 < state.read_gb_per_s < 10_000
