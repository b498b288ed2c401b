import sys
from types import ModuleType

import pytest

from optimc.errors import CalibrationError, MissingExtraError
from optimc_passes.calibrate.hub_dataset import hub_texts


class Rows(list):
    def shuffle(self, seed):
        return Rows(self[seed:] + self[:seed])


@pytest.fixture
def library(monkeypatch):
    """Stand in for the `datasets` library."""

    def install(load_dataset):
        module = ModuleType("datasets")
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)

    return install


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"hub:org/name needs datasets: pip install 'optimc\[datasets\]'"):
        hub_texts("org/name", split="train", field="text", seed=0)


def test_rows_come_in_the_order_of_the_seed(library):
    asked = []

    def load_dataset(name, *, split):
        asked.append((name, split))
        return Rows({"body": word} for word in ("a", "b", "c"))

    library(load_dataset)
    assert list(hub_texts("org/name", split="test", field="body", seed=1)) == ["b", "c", "a"]
    assert asked == [("org/name", "test")]


def test_a_missing_field_is_named(library):
    library(lambda name, split: Rows([{"title": "a"}]))
    with pytest.raises(
        CalibrationError, match="hub:org/name, row 0 has no such field as text field 'text'; its fields: title"
    ):
        list(hub_texts("org/name", split="train", field="text", seed=0))


def test_a_failing_library_is_one_line(library):
    def load_dataset(name, split):
        raise ConnectionError("no\nroute")

    library(load_dataset)
    with pytest.raises(CalibrationError, match=r"hub:org/name, split train: cannot be loaded \(no route\)"):
        hub_texts("org/name", split="train", field="text", seed=0)
