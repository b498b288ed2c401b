"""How a comparison runs one benchmark, once or several times over."""

import pytest

from optimc.measure.compare.measure_plan import plain_bench
from optimc.measure.roofline.row_bound import RowBound
from optimc.measure.workload import Workload
from optimc.progress import no_progress


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_bound_is_held_against_the_figures_that_are_shown(scripted_engine, steady_script, repeats):
    seen = []

    def bound(result):
        seen.append(result)
        return RowBound(0.5, 0.5, None, None, "memory", 0.8, "")

    engine = scripted_engine(steady_script(0.001, 0.001))
    load = Workload(prompt_tokens=16, output_tokens=2, requests=2, warmup_requests=0)
    result = plain_bench(repeats)(engine, load, no_progress, bound=bound)
    assert [each.runs for each in seen] == [repeats]
    assert seen[0].tpot_ms == result.tpot_ms
    assert result.bound is not None
