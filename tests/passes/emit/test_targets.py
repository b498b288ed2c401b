"""The table of targets."""

import pytest

from optimc.errors import UnknownNameError
from optimc_passes.emit import TARGETS


def test_targets_are_found_by_name() -> None:
    assert "onnxruntime" in TARGETS
    with pytest.raises(UnknownNameError, match="unknown target 'tpu'; known: .*onnxruntime"):
        TARGETS["tpu"]
