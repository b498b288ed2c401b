"""One HTML file that shows what was measured: a verdict, a table, charts, and how it was done. Works offline."""

from optimc.measure.report.html_report import html_report
from optimc.measure.report.report import Report

__all__ = ["Report", "html_report"]
