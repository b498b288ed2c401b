"""`optimc bench`: what its help promises."""


import pytest

from optimc.cli.bench import bench
from optimc.errors import ConfigError
from optimc.measure.bench_result import DEFINITIONS


def test_the_help_means_by_each_figure_what_the_report_means():
    text = " ".join((bench.__doc__ or "").split())
    missing = [name for name, meaning in DEFINITIONS.items() if f": {meaning}" not in text]
    assert missing == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "ngram"}, "--speculation: needs a PLAN, not --url"),
        ({"no_speculation": True}, "--no-speculation: needs a PLAN, not --url"),
    ],
)
def test_what_needs_a_plan_is_refused_with_a_url(options, message):
    with pytest.raises(ConfigError, match=message):
        bench(url="http://127.0.0.1:1", **options)
