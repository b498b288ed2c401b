"""The page as a browser lays it out: labels apart, nothing wider than the window."""

import json
import os
import re
import shutil
import subprocess

import pytest

from optimc.measure.report import html_report

pytestmark = pytest.mark.slow  # starts a browser

NAMES = ("chromium", "chromium-headless-shell", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")

# What a label covers is its box; a pixel of it is the font's own room.
LOOK = """<script>
const boxes = [...document.querySelectorAll('#scatter-tpot .label, #scatter-ttft .label')].map(e => ({
  name: e.textContent, chart: e.closest('figure').id, box: e.getBoundingClientRect() }));
const touching = [];
for (const a of boxes) for (const b of boxes)
  if (a !== b && a.chart === b.chart && a.box.left + 1 < b.box.right && b.box.left + 1 < a.box.right
      && a.box.top + 3 < b.box.bottom && b.box.top + 3 < a.box.bottom) touching.push([a.name, b.name]);
document.title = JSON.stringify({labels: boxes.length, touching,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth});
</script></body>"""


@pytest.fixture(scope="module")
def browser():
    found = (shutil.which(name) for name in (os.environ.get("OPTIMC_CHROMIUM", ""), *NAMES) if name)
    path = next((path for path in found if path), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell, or set OPTIMC_CHROMIUM")
    return path


@pytest.mark.parametrize("width", [375, 1200])
def test_labels_lie_apart_and_the_page_fits_its_window(browser, full_report, tmp_path, width):
    page = tmp_path / "page.html"
    page.write_text(html_report(full_report).replace("</body>", LOOK), "utf-8")
    command = [browser, *FLAGS, f"--window-size={width},2000", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    shown = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True).stdout
    seen = json.loads(
        re.search(r"<title>(.*?)</title>", shown)[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    )
    assert seen == {"labels": 14, "touching": [], "wide": 0}
