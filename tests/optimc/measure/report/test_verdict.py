"""The one sentence says no more than was measured."""

from dataclasses import replace
from pathlib import Path

from optimc.measure.attribution.attribution import Attribution, Row
from optimc.measure.attribution.effect import Effect
from optimc.measure.compare.failure import Failure
from optimc.measure.report import html_report
from optimc.measure.report.verdict import attribution_verdict, verdict


def test_plans_without_quality_have_not_failed(full_report):
    comparison = full_report.comparison
    failed = next(row for row in comparison.rows if row.problems)
    unmeasured = next(row for row in comparison.rows if row.name == "unmeasured")
    mixed = replace(comparison, rows=(failed, unmeasured))
    assert verdict(mixed).startswith("No plan to recommend: no plan has both latency and quality; ")
    assert verdict(replace(comparison, rows=(failed,))) == (
        "No plan to recommend: every plan failed a gate or requests."
    )


def test_what_could_not_be_measured_is_told(full_report):
    lost = replace(full_report.comparison, failures=(Failure("lost", Path("lost.plan"), "no such engine"),))
    assert verdict(lost).endswith("; no figures of lost.")
    assert "lost: no figures: no such engine" in html_report(replace(full_report, comparison=lost))


def test_all_factors_together_are_no_factor():
    def row(factor, kind, value):
        return Row(factor, kind, "without", "load", {"tpot_p50": Effect(value, value * 0.9, value * 1.1, 3)})

    rows = (row("all", "all", 0.2), row("rtn[0]", "pass", 0.5), row("fuse[1]", "pass", 0.8))
    told = attribution_verdict(Attribution("tiny", {}, rows, {}, {}, ()))
    assert told == "rtn[0] helps tiny most: with it, a token takes 0.5 times as long as without."
    assert attribution_verdict(Attribution("tiny", {}, rows[:1], {}, {}, ())).startswith("No factor of tiny")
