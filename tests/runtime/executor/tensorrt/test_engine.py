"""How TensorRT is called, held against the real module, which a machine without a GPU has and cannot run."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import tensorrt_rtx as real

from optimc_runtime.executor.tensorrt import engine
from optimc_runtime.executor.tensorrt.engine import _new_log

from .fake_tensorrt import FakeConfig, FakeContext, FakeEngine, FakeRuntime

SOURCE = inspect.getsource(engine)


def names_after(prefix: str) -> set[str]:
    return set(re.findall(rf"(?<![\w.]){prefix}\.(\w+)", SOURCE))


@pytest.mark.parametrize(
    ("prefix", "kind", "fake"),
    [
        (r"self\._runtime", real.Runtime, FakeRuntime),
        (r"(?:self\._)?engine", real.ICudaEngine, FakeEngine),
        (r"self\._context", real.IExecutionContext, FakeContext),
        ("config", real.IRuntimeConfig, FakeConfig),
    ],
)
def test_what_is_called_exists(prefix: str, kind: type, fake: type) -> None:
    names = names_after(prefix)
    assert len(names) >= 2
    for name in names:
        assert hasattr(kind, name), f"{kind.__name__} has no {name}"
    methods = {name for name in names if callable(getattr(kind, name))}
    assert not [name for name in methods if not hasattr(fake, name)], "the fakes stand for all that is called"


def test_what_is_named_of_the_module_exists() -> None:
    names = names_after(r"(?:self\._)?trt") - {"__name__", "__version__"}
    assert {"Runtime", "ILogger", "TensorLocation"} <= names
    assert not [name for name in names if not hasattr(real, name)]
    assert {"FLOAT", "HALF", "BF16", "INT8", "INT64", "BOOL"} <= set(real.DataType.__members__)


def test_a_real_runtime_takes_our_log_and_a_mapped_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """It refuses what is no engine, and what it says is kept for our messages and printed nowhere."""
    log = _new_log(real)
    runtime = real.Runtime(log)
    blob = np.zeros(4096, np.uint8)
    blob.flags.writeable = False
    validity, faults = runtime.get_engine_validity(blob)
    assert validity == real.EngineValidity.INVALID
    assert int(faults) >= 0
    assert runtime.deserialize_cuda_engine(blob) is None
    assert log.last
    assert "\n" not in log.last
    assert capfd.readouterr() == ("", "")
