"""The benchmarks are scripts, no installed package: what they import lies beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
