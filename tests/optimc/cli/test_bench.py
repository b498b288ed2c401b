"""`optimc bench`: what its help promises."""

from optimc.cli.bench import bench
from optimc.measure.bench_result import DEFINITIONS


def test_the_help_means_by_each_figure_what_the_report_means():
    text = " ".join((bench.__doc__ or "").split())
    missing = [name for name, meaning in DEFINITIONS.items() if f": {meaning}" not in text]
    assert missing == []
