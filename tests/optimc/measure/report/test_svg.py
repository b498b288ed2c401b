"""Markup is escaped once, and nothing but markup is trusted."""

import pytest

from optimc.measure.report.svg import Markup, element, escape, number, path


def test_text_and_attributes_are_escaped():
    assert element("p", {"title": "a\"b'"}, "<b> & ]]>") == ('<p title="a&quot;b&#39;">&lt;b&gt; &amp; ]]&gt;</p>')


def test_markup_is_kept():
    assert element("p", {}, Markup("<b>x</b>"), element("i")) == "<p><b>x</b><i></i></p>"


def test_what_xml_cannot_hold_is_replaced():
    assert escape("a\x00b\x1bc\ud800d\te") == "a\ufffdb\ufffdc\ufffdd\te"


def test_numbers_are_short():
    assert [number(v) for v in (1.0, 1.005, -0.001, 12.345)] == ["1", "1", "0", "12.35"]
    assert path([(0, 0), (1.5, 2)]) == "M0 0 L1.5 2"
    with pytest.raises(ValueError, match="finite"):
        number(float("nan"))
    assert element("g", {"x": 1.0, "y": None}) == '<g x="1"></g>'
