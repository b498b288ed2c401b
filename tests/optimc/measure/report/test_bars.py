"""What stands beside bars has room, however long it is."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from optimc.measure.report.bars import RatioBar, ratio_bars
from optimc.measure.report.chart import WIDTH
from optimc.measure.report.labels import CHARACTER_WIDTH

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(0.98, 0.97, 0.99), (0.0123, 0.0101, 0.0145), (1.02, None, None), (1.23e-5, 1.11e-5, 1.35e-5)],
)
def test_no_figure_reaches_beyond_the_chart(value, low, high):
    bars = [
        RatioBar("inflight_batching", "served at once", value, low, high, 9),
        RatioBar("all", "x", 2.0, 1.9, 2.1, 9),
    ]
    chart = ET.fromstring(f"<div>{ratio_bars('bars', 'TTFT', bars, less_is_better=True)}</div>")
    told = [each for each in chart.iter(f"{SVG}text") if each.get("class") == "value"]
    assert len(told) == 2
    for each in told:
        assert each.text is not None
        assert float(each.get("x", "nan")) + len(each.text) * CHARACTER_WIDTH <= WIDTH
    for rect in chart.iter(f"{SVG}rect"):
        assert float(rect.get("x", "nan")) + float(rect.get("width", "nan")) <= float(told[0].get("x", "nan"))
