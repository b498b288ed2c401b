"""A weight that is not a number stops the build before any work, by name."""

import ml_dtypes
import numpy as np
import pytest

from optimc.errors import CheckpointError
from optimc_passes.artifact import Artifact
from optimc_passes.pipeline import GraphSource, run_pipeline
from optimc_passes.verify import finite_weights
from optimc_passes.verify.finite_weights import check_finite_weights
from optimc_passes.weights import Dense


def test_every_such_weight_is_named_with_its_first_element(monkeypatch):
    monkeypatch.setattr(finite_weights, "_PIECE_ELEMENTS", 4)
    arrays = {name: np.ones((3, 5), dtype) for name, dtype in {"a": np.float32, "b": ml_dtypes.bfloat16}.items()}
    arrays["wide"] = np.full(2, 1e300)  # finite, but not in float32
    arrays["a"][1, 2], arrays["a"][2, 4], arrays["b"][0, 0] = np.nan, np.inf, -np.inf
    with pytest.raises(CheckpointError) as refused:
        check_finite_weights({name: Dense.of(array) for name, array in arrays.items()} | {"ok": Dense.of(np.ones(9))})
    assert str(refused.value).splitlines()[1:] == [
        "  a: 2 of 15 elements, the first is nan at [1, 2]",
        "  b: 1 of 15 elements, the first is -inf at [0, 0]",
        "  wide: 2 of 2 elements, the first is 1e+300 at [0]",
    ]


def test_they_stop_a_build_without_any_pass(tiny_decoder):
    decoder = tiny_decoder()
    decoder.arrays["model.norm.weight"][3] = np.nan
    source = GraphSource("key", lambda: pytest.fail("exported"))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 1 of 32 elements, the first is nan at \[3\]"):
        run_pipeline([], Artifact.start(decoder.checkpoint()), source)
