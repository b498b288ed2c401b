"""The page is one file that holds all, whatever names hold."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from optimc.measure.report import Report, html_report
from optimc.measure.report.svg import SVG_NAMESPACE

SVG = re.compile(r"<svg .*?</svg>", re.DOTALL)
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def charts(page):
    return [found for found in SVG.findall(page) if 'role="img"' in found]


def test_every_drawing_is_sound_xml(full_report):
    drawings = SVG.findall(html_report(full_report))
    assert len(drawings) > 12
    for drawing in drawings:
        assert ElementTree.fromstring(drawing).tag == f"{{{SVG_NAMESPACE}}}svg"


def test_every_chart_has_title_description_and_its_figures_as_a_table(full_report):
    page = html_report(full_report)
    # Two scatters, two curves, three metrics in two modes, three rooflines.
    assert len(charts(page)) == 2 + 2 + 6 + 3
    for chart in charts(page):
        root = ElementTree.fromstring(chart)
        named = root.attrib["aria-labelledby"].split()
        for tag, name in zip(("title", "desc"), named, strict=True):
            found = root.find(f"{{{SVG_NAMESPACE}}}{tag}")
            assert found.attrib["id"] == name
            assert found.text.strip()
    for figure in re.findall(r"<figure .*?</figure>", page, re.DOTALL):
        assert "<details><summary>Figures</summary>" in figure
        assert '<table class="data">' in figure
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_asks_for_nothing(full_report):
    page = html_report(full_report)
    assert set(re.findall(r"[a-z]+://[^\s\"'<>)]*", page)) == {SVG_NAMESPACE}
    assert not re.search(r"\ssrc\s*=", page)
    assert not re.search(r'href="(?!#)', page)
    assert "@import" not in page
    assert "url(" not in page
    assert re.findall(r"<script[^>]*>", page) == ['<script type="application/json" id="data">']


def test_hostile_names_stay_text(full_report):
    page = html_report(full_report)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#39;&amp;]]&gt;" in page
    data = json.loads(DATA.search(page)[1])
    assert data["comparison"]["rows"][6]["name"] == "<script>alert(1)</script>\"'&]]>"
    assert "\x00" not in html_report(Report("a\x00b", full_report.machine))


def test_sections_stand_in_order_and_empty_ones_are_left_out(full_report, one_row_report):
    def sections(report):
        return re.findall(r'<section id="([^"]*)">', html_report(report))

    assert sections(full_report) == ["plans", "quality", "load", "attribution", "roofline", "method"]
    assert sections(one_row_report) == ["plans", "method"]
    assert sections(Report("nothing", full_report.machine)) == ["method"]
    assert sections(replace(full_report, comparison=None, ladders={}, rooflines={})) == ["attribution", "method"]


def test_equal_reports_give_equal_bytes(full_report):
    assert html_report(full_report) == html_report(replace(full_report))


def test_what_was_not_measured_says_so(full_report, one_row_report):
    page = html_report(full_report)
    assert "Not shown: unmeasured (latency and KL not measured)." in page
    assert "<b>speculation (alone)</b>: the plan has no heads" in page
    assert "n/a" in html_report(one_row_report)
    assert "No plan to recommend: no plan has both latency and quality." in html_report(one_row_report)


def test_failed_gates_stand_above_the_table(full_report):
    page = html_report(full_report)
    assert page.index("max_kl 0.5: measured 2.1</li>") < page.index('<table class="plans">')
    assert "✗ failed" in page


def test_twelve_plans_stay_below_300_kb(full_report):
    # Twelve plans: the seven and five of them again, under other names.
    comparison = full_report.comparison
    more = tuple(replace(row, name=f"again-{row.name}") for row in comparison.rows[:4])
    twelve = replace(comparison, rows=(*comparison.rows, *more))
    ladders = {**full_report.ladders, **{f"again-{n}": found for n, found in list(full_report.ladders.items())[:5]}}
    rooflines = {name: next(iter(full_report.rooflines.values())) for name in ladders}
    page = html_report(replace(full_report, comparison=twelve, ladders=ladders, rooflines=rooflines))
    assert len(twelve.rows) == len(ladders) == 12
    assert len(page.encode()) < 300_000


def test_the_data_has_no_number_that_readers_refuse(full_report):
    rows = list(full_report.comparison.rows)
    measured = rows[0].measurement
    broken = replace(measured, quality=replace(measured.quality, perplexity=float("nan")))
    rows[0] = replace(rows[0], measurement=broken)
    page = html_report(replace(full_report, comparison=replace(full_report.comparison, rows=tuple(rows))))
    assert json.loads(DATA.search(page)[1])["comparison"]["rows"][0]["perplexity"] is None


def test_the_verdict_names_the_fastest_and_the_most_faithful(full_report):
    page = html_report(full_report)
    assert (
        "smollm2-int4 is the fastest of 8 plans that were compared, 143 ms to the first token and 11.9 ms per token at "
        "a KL of 0.19 nats; smollm2-fp32 is the most faithful, a KL of nothing but rounding at 41.0 ms per token;"
    ) in page
