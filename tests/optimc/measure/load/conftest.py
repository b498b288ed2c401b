"""Loads on virtual time, down to single exchanges."""

import pytest

from optimc.measure.bench import bench_driver
from optimc.measure.engine_driver import EngineDriver
from optimc.measure.load.closed_loop import run_closed_loop
from optimc.measure.load.open_loop import run_open_loop
from optimc.measure.workload import Workload


@pytest.fixture
def bench(virtual_time):
    def run(engine, *, run_id="run", calls=None, **options):
        driver = EngineDriver(engine, virtual_time.clock)
        workload = Workload(**{"prompt_tokens": 16, "output_tokens": 2, **options})
        return virtual_time.run(bench_driver(driver, workload, virtual_time.clock, run_id, dataset=calls))

    return run


@pytest.fixture
def load_run(virtual_time):
    """The LoadRun of a load, before it is summed up."""

    def run(engine, *, calls=None, **options):
        driver = EngineDriver(engine, virtual_time.clock)
        workload = Workload(**{"prompt_tokens": 16, "output_tokens": 2, **options})
        loop = run_open_loop if workload.is_open else run_closed_loop

        async def both():
            ready = await driver.prepare(workload, "run", calls)
            return await loop(driver, ready, workload, virtual_time.clock, lambda done: None)

        return virtual_time.run(both())

    return run
