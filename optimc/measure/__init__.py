"""Measurement: benchmark, evaluation against the original model, comparison of recipes."""

from optimc.measure.bench import run_bench
from optimc.measure.bench_result import BenchResult
from optimc.measure.compare.compare_plans import compare
from optimc.measure.compare.comparison import Comparison
from optimc.measure.compare.config import CompareConfig
from optimc.measure.compare.row import Row
from optimc.measure.evaluation import EvalResult, eval_plan, evaluate
from optimc.measure.machine import Machine, read_machine
from optimc.measure.workload import Workload
from optimc.progress import Progress

__all__ = [
    "BenchResult",
    "CompareConfig",
    "Comparison",
    "EvalResult",
    "Machine",
    "Progress",
    "Row",
    "Workload",
    "compare",
    "eval_plan",
    "evaluate",
    "read_machine",
    "run_bench",
]
