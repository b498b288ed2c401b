"""The probes of memory and arithmetic: they answer on every instruction set, and refuse what means nothing."""

import numpy as np
import pytest

from optimc_runtime import _native


@pytest.mark.parametrize("instruction_set", _native.supported_instruction_sets())
def test_every_instruction_set_reads_and_multiplies(instruction_set, monkeypatch):
    monkeypatch.setenv("OPTIMC_ISA", instruction_set)
    words = np.ones(1 << 15, np.uint64)  # 256 KiB
    # A machine of this century reads more than 10 MB/s, and does more than 10 million operations a second.
    assert 1e7 < _native.probe_read(words, 2, 2) < 1e14
    assert 1e7 < _native.probe_int8_ops(2, 0.001) < 1e16
    assert 1e7 < _native.probe_float_ops(2, 0.001) < 1e16


def test_what_means_nothing_is_refused():
    words = np.ones(1 << 10, np.uint64)
    with pytest.raises(ValueError, match="threads must be from 1 to 1024"):
        _native.probe_read(words, 0, 1)
    with pytest.raises(ValueError, match="512 bytes for every thread"):
        _native.probe_read(words, 17, 1)
    with pytest.raises(ValueError, match="rounds"):
        _native.probe_read(words, 1, 0)
    with pytest.raises(ValueError, match="seconds"):
        _native.probe_int8_ops(1, 0.0)
    with pytest.raises(TypeError):
        _native.probe_read(words.astype(np.float32), 1, 1)
