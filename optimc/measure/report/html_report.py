"""The page: sections in the order a reader asks for them, in one file without scripts or addresses."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from optimc.measure.bench_result import DEFINITIONS
from optimc.measure.report import sections
from optimc.measure.report.report import Report
from optimc.measure.report.svg import Markup, element, join
from optimc.measure.report.verdict import attribution_verdict, verdict


def html_report(report: Report) -> str:
    """Return the page. Equal reports give equal bytes."""
    body = join([_header(report), element("main", {}, *_sections(report)), _footer(report)])
    head = element(
        "head",
        {},
        element("meta", {"charset": "utf-8"}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("title", {}, f"{report.title} – optimc"),
        element("style", {}, Markup(files(__package__).joinpath("style.css").read_text("utf-8"))),
    )
    data = Markup(f'<script type="application/json" id="data">{report.script()}</script>')
    page = element("html", {"lang": "en"}, head, element("body", {}, body, data))
    return f"<!doctype html>\n{page}\n"


def _header(report: Report) -> Markup:
    sentences = []
    if report.comparison is not None and report.comparison.rows:
        sentences.append(verdict(report.comparison))
    elif report.attribution is not None:
        sentences.append(attribution_verdict(report.attribution))
    setting = [] if report.comparison is None else [report.comparison.config.setting]
    return element(
        "header",
        {},
        element("p", {"class": "brand"}, "optimc · measured, not promised"),
        element("h1", {}, report.title),
        *(element("p", {"class": "verdict"}, sentence) for sentence in sentences),
        *(element("p", {"class": "setting"}, line) for line in [*setting, str(report.machine)]),
    )


def _sections(report: Report) -> list[Markup]:
    found: list[Markup | None] = []
    comparison = report.comparison
    if comparison is not None and comparison.rows:
        problems = element("ul", {"class": "problems"}, *(element("li", {}, line) for line in comparison.problems()))
        table = element("div", {"class": "scroll", "tabindex": "0"}, sections.comparison_table(comparison))
        notes = _list(comparison.footnotes(), "notes")
        found.append(_section("plans", "All plans", [*([problems] if comparison.problems() else []), table, notes]))
        found.append(_charts("quality", "Speed against quality", sections.scatters(comparison)))
    ladder_text = "Requests arrive at random at a rising rate; a rate passes while enough of them keep the limits."
    ladder_notes = [_list(sections.knee_reasons(report), "notes")] if report.ladders else []
    found.append(_charts("load", "Under load", sections.ladder_curves(report), ladder_text, ladder_notes))
    if report.attribution is not None:
        found.append(_attribution(report))
    roofline_text = "Every step must read the weights and the cache once: no engine on this machine beats the bound."
    found.append(_charts("roofline", "How far the machine goes", sections.roofline_charts(report), roofline_text))
    found.append(_method(report))
    return [section for section in found if section is not None]


def _attribution(report: Report) -> Markup | None:
    attribution = report.attribution
    assert attribution is not None
    charts = sections.attribution_bars(attribution)
    table = sections.attribution_table(attribution)
    missing = [
        element("li", {}, element("b", {}, factor), f": {reason}")
        for factor, reason in sections.unmeasured(attribution)
    ]
    after: list[Markup] = []
    if table is not None:
        after += [element("h3", {}, "Size and quality"), element("div", {"class": "scroll"}, table)]
    if attribution.interaction:
        told = [
            f"{name}: ×{effect.value:.3g}"
            + ("" if effect.low is None or effect.high is None else f" ({effect.low:.3g} to {effect.high:.3g})")
            for name, effect in attribution.interaction.items()
        ]
        after += [
            element("h3", {}, "Interaction"),
            element("p", {}, "What all factors together did, over the product of each alone; 1 is no interaction."),
            _list(told, "notes"),
        ]
    if missing:
        after += [element("h3", {}, "Not measured"), element("ul", {"class": "notes"}, *missing)]
    text = f"What each factor of {attribution.recipe} gained, from pairs of runs in turns, with 95% intervals."
    if not charts and not after:
        return None
    notes = [*after, *([_list(attribution.method, "notes")] if attribution.method else [])]
    return _charts("attribution", "What each optimization gained", charts, text, notes, even_empty=True)


def _method(report: Report) -> Markup:
    from importlib.metadata import version

    terms = [
        element("div", {}, element("dt", {}, name), element("dd", {}, meaning)) for name, meaning in DEFINITIONS.items()
    ]
    machine = [element("li", {}, str(report.machine)), element("li", {}, f"machine id {report.machine.id}")]
    lines = [element("li", {}, line) for line in (*report.method, f"optimc {version('optimc')}")]
    definitions = element("details", {}, element("summary", {}, "What each figure means"), element("dl", {}, *terms))
    return _section(
        "method",
        "Machine and method",
        [element("ul", {"class": "notes"}, *machine, *lines), definitions],
    )


def _footer(report: Report) -> Markup:
    taken = set()
    if report.comparison is not None:
        taken = {origin.measured_at for row in report.comparison.rows for origin in row.measurement.origins}
    when = f"Measured {min(taken)} to {max(taken)}. " if len(taken) > 1 else f"Measured {min(taken)}. " if taken else ""
    return element("footer", {}, f"{when}The figures are in this file as JSON too, in the element “data”.")


def _charts(
    section_id: str,
    title: str,
    charts: Sequence[Markup],
    text: str = "",
    after: Sequence[Markup] = (),
    *,
    even_empty: bool = False,
) -> Markup | None:
    if not charts and not even_empty:
        return None
    intro = [element("p", {"class": "intro"}, text)] if text else []
    grid = [element("div", {"class": "charts"}, *charts)] if charts else []
    return _section(section_id, title, [*intro, *grid, *after])


def _section(section_id: str, title: str, content: Sequence[Markup]) -> Markup:
    return element("section", {"id": section_id}, element("h2", {}, title), *content)


def _list(lines: Sequence[str], css_class: str) -> Markup:
    return element("ul", {"class": css_class}, *(element("li", {}, line) for line in lines))
