"""What an error says of one plan, and which errors say nothing of it."""

import pytest

from optimc.errors import ConfigError, Fault, MeasureError, MissingExtraError, StorageError
from optimc.measure.finding import reason_of


def test_the_first_line_is_the_reason():
    assert reason_of(MeasureError("no kernel\nfor it")) == "no kernel"
    assert reason_of(MeasureError("")) == "MeasureError"


def test_faults_are_the_reason_not_their_number():
    assert reason_of(ConfigError("r.yaml", [Fault("a", "is wrong", 3), Fault("", "and so is b")])) == (
        "a: is wrong; and so is b"
    )


@pytest.mark.parametrize("error", [StorageError("no room"), MissingExtraError("onnxruntime", "ort", "serving")])
def test_what_the_machine_lacks_is_raised_again(error):
    with pytest.raises(type(error)):
        reason_of(error)
