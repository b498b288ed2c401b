"""A browser for the tests of the page; what drives it lies beside them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser, find_chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium-headless-shell, or set OPTIMC_CHROMIUM")
    opened = Browser(path, tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
