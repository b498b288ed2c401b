"""Nothing a plan's program section says makes the cpu engine leave its memory: it is refused, or it runs.

Every number and word of a real program is changed, one at a time, and the plan loaded and run. This happens in a
process of its own, whose death would be the failure.
"""

import subprocess
import sys

import pytest

SCRIPT = r"""
import copy, sys
import numpy as np
from optimc.errors import EngineError, PlanError
from optimc.plan import Plan
from optimc_runtime.executor.base import StepPlan
from optimc_runtime.executor.load import load_executor

plan = Plan.open(sys.argv[1])
program = plan.manifest.program
STEP = StepPlan(
    tokens=np.arange(5), positions=np.arange(5), slots=np.arange(5), query_start=np.array([0, 5], np.int32),
    context_len=np.array([0], np.int32), block_table=np.zeros((1, 1), np.int32), logits_rows=np.array([1, 4]),
)

def leaves(node, path=()):
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*path, index))
    else:
        yield path, node

def others(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 0, -1, value * 1000, 2**31 - 1, 2**62]
    if isinstance(value, float):
        return [-1.0]
    return ["nonsense", "logits", "int8", "float16", *list(program["weights"])[:3]]

refused = ran = 0
for path, value in leaves(program):
    for other in others(value):
        if other == value:
            continue
        changed = copy.deepcopy(program)
        node = changed
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = other
        plan.manifest = plan.manifest.model_copy(update={"program": changed})
        try:
            executor = load_executor(plan, kv_memory_bytes=1 << 20, threads=2)
            try:
                executor.execute(STEP)
            finally:
                executor.close()
            ran += 1
        except (PlanError, EngineError) as error:
            assert str(plan.path) in str(error) or isinstance(error, EngineError), error
            refused += 1
        except MemoryError:
            refused += 1
print(refused, ran)
"""


@pytest.mark.parametrize("plan", ["plain", "quantized"])
def test_a_program_with_anything_changed_is_refused_or_runs(plan, build):
    passes = ["fuse"]
    if plan == "quantized":
        passes = [{"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}, *passes]
    path = build(f"damaged-{plan}", target={"backend": "cpu", "kv_dtype": "int8"}, passes=passes).path
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, ran = map(int, done.stdout.split())
    assert refused > 500
    assert ran > 50  # names, scales and the like
