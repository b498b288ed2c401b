import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from optimc.errors import CheckpointError
from optimc_passes.load.safetensors_file import read_header


def write(path, header: object, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_reads_what_the_library_writes(tmp_path, dtype):
    tensor = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    save_file({"a": torch.ones(3), "b": tensor}, tmp_path / "x.safetensors")
    array = read_header(tmp_path / "x.safetensors")["b"].read()
    assert array.shape == (3, 4)
    np.testing.assert_array_equal(array.astype(np.float32), tensor.to(torch.float32).numpy())


def test_bf16_is_the_ml_dtypes_type(tmp_path):
    save_file({"a": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    assert read_header(tmp_path / "x.safetensors")["a"].read().dtype == ml_dtypes.bfloat16


def test_scalars_and_empty_tensors(tmp_path):
    save_file({"scalar": torch.tensor(3.0), "empty": torch.ones(0, 4)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    assert entries["scalar"].read() == 3
    assert entries["empty"].read().shape == (0, 4)


def test_data_that_starts_at_an_odd_byte(tmp_path):
    # Old writers did not pad the header.
    path = tmp_path / "x.safetensors"
    facts = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(facts).encode()
    text += b" " * (1 - len(text) % 2)
    write(path, text, np.array([1, 2], np.float32).tobytes())
    entry = read_header(path)["a"]
    assert entry.offset % 2 == 1
    np.testing.assert_array_equal(entry.read(), [1, 2])


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": "xy", "data_offsets": [0, 8]}},
    ],
)
def test_damaged_headers_are_refused_by_file(tmp_path, header):
    write(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors: damaged"):
        read_header(tmp_path / "x.safetensors")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.safetensors: No such file"):
        read_header(tmp_path / "x.safetensors")
