import math

import numpy as np
import pytest

from optimc.errors import CheckpointError
from optimc_passes.load import match_tensors as module
from optimc_passes.load.match_tensors import match_tensors, same_values
from optimc_passes.load.parameters import ParameterTable
from optimc_passes.load.safetensors_file import NUMPY_DTYPES, TensorEntry
from optimc_passes.load.shards import TensorTable


@pytest.fixture
def entry(tmp_path):
    """Write an array to a file of its own and return its entry."""

    def make(name: str, values, dtype: str = "F32") -> TensorEntry:
        array = np.asarray(values, NUMPY_DTYPES[dtype])
        path = tmp_path / f"{name}.{dtype}"
        path.write_bytes(array.tobytes())
        return TensorEntry(name, path, dtype, array.shape, 0)

    return make


def parameters(*names: str, ties: dict[str, str] | None = None, integers: tuple[str, ...] = ()) -> ParameterTable:
    shapes = dict.fromkeys(names, (2,))
    return ParameterTable(shapes, frozenset(integers), ties or {}, "base", (r"\.unused$",))


def table(*entries: TensorEntry) -> TensorTable:
    return TensorTable({entry.name: entry for entry in entries}, {}, ())


def test_same_values_compares_numbers_not_bytes(entry):
    assert same_values(entry("a", [1, 2]), entry("b", [1, 2], "BF16"))
    assert not same_values(entry("a", [1, 2]), entry("b", [1, 3], "BF16"))


def test_same_values_sees_every_piece(entry, monkeypatch):
    monkeypatch.setattr(module, "_COMPARED_BYTES", 8)
    values = np.arange(7, dtype=np.float32)
    for position in range(7):
        other = values.copy()
        other[position] += 1
        assert not same_values(entry("a", values), entry("b", other))
    assert same_values(entry("a", values), entry("b", values))


def test_families_own_allow_list_is_honoured(entry):
    match = match_tensors(table(entry("w", [1, 2]), entry("x.unused", [1, 2])), parameters("w"), "here")
    assert set(match.entries) == {"w"}
    assert "x.unused" in match.notes[0]


def test_integer_buffers_must_hold_integers(entry):
    with pytest.raises(CheckpointError, match="w is F32, readable are BOOL"):
        match_tensors(table(entry("w", [1, 2])), parameters("w", integers=("w",)), "here")
    match_tensors(table(entry("w", [1, 2], "I64")), parameters("w", integers=("w",)), "here")


def test_unscaled_fp8_is_not_a_plain_weight(entry):
    with pytest.raises(CheckpointError, match="w is F8_E4M3, readable are F32, BF16, F16, F64"):
        match_tensors(table(entry("w", [1, 2], "F8_E4M3")), parameters("w"), "here")


def test_partly_broken_ties_are_refused(entry):
    ties = {"a": "e", "b": "e"}
    with pytest.raises(CheckpointError, match="a have values of their own"):
        match_tensors(table(entry("e", [1, 2]), entry("a", [3, 4])), parameters("e", "a", "b", ties=ties), "here")


def test_both_ends_of_a_tie_absent_names_the_source(entry):
    with pytest.raises(CheckpointError, match="here: 1 parameter has no tensor: e"):
        match_tensors(table(entry("w", [1, 2])), parameters("w", "e", "a", ties={"a": "e"}), "here")


def test_long_lists_are_cut(entry):
    names = [f"w{number}" for number in range(12)]
    with pytest.raises(CheckpointError, match=r"12 parameters have no tensor: w0, w1, w2, w3, w4 and 7 more; not one"):
        match_tensors(table(), parameters(*names), "here")
    with pytest.raises(CheckpointError, match=r"; and 7 more$"):
        match_tensors(table(*(entry(name, [1]) for name in names)), parameters(*names), "here")


def test_shapes_are_shown(entry):
    with pytest.raises(CheckpointError, match=r"w is \[1, 3\], the configuration makes it \[2\]"):
        match_tensors(table(entry("w", [[1, 2, math.pi]])), parameters("w"), "here")
