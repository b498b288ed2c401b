"""What cannot run is refused before it runs, in words."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimc.errors import (
    EngineError,
    MissingExtraError,
    PlanCorruptError,
    PlanError,
    PlanTargetError,
    PlanVersionError,
)
from optimc.plan import Plan, TargetInfo
from optimc_passes.dialect import PagedAttention
from optimc_passes.emit.onnxruntime import lower
from optimc_runtime.executor import onnxruntime as executor_module
from optimc_runtime.executor.load import load_executor
from optimc_runtime.executor.onnxruntime import OnnxRuntimeExecutor


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Any) -> Any:
    return tiny_decoder()


def test_an_unknown_backend_is_named_with_the_known_ones(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(decoder, target=TargetInfo(backend="tpu"))
    with pytest.raises(PlanTargetError, match=r"built for 'tpu', this optimc runs: .*onnxruntime"):
        load_executor(plan)
    with pytest.raises(PlanTargetError, match="built for 'tpu', this is the onnxruntime executor"):
        OnnxRuntimeExecutor(plan)


def test_an_older_onnxruntime_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(decoder, target=TargetInfo(backend="onnxruntime", requirements={"onnxruntime": ">=99.1"}))
    with pytest.raises(PlanTargetError, match=r"requires onnxruntime >=99\.1, installed is \d"):
        load_executor(plan)


def test_a_requirement_nobody_knows_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(decoder, target=TargetInfo(backend="onnxruntime", requirements={"moon": "full"}))
    with pytest.raises(PlanTargetError, match="requires moon full"):
        load_executor(plan)


def test_another_cache_type_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    kv = lower(decoder.graph(), block_size=4).kv.model_copy(update={"dtype": "int8"})
    with pytest.raises(PlanTargetError, match="wants a int8 KV cache"):
        load_executor(make_plan(decoder, kv=kv))


def test_a_missing_onnxruntime_names_the_extra(
    decoder: Any, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(decoder)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'optimc\[ort\]'"):
        load_executor(plan)


def test_memory_for_less_than_a_block_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanTargetError, match="1,000 bytes holds no block; one block of 4 tokens takes 1,024 bytes"):
        load_executor(make_plan(decoder), kv_memory_bytes=1000)


def test_memory_beyond_the_machines_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanTargetError, match=r"exceeds this machine's [\d,]+; lower kv_memory"):
        load_executor(make_plan(decoder), kv_memory_bytes=1 << 50)


def test_a_damaged_program_section_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(PlanCorruptError, match=r"program section is damaged \(model: "):
        load_executor(make_plan(decoder, program={}))
    program = lower(decoder.graph(), block_size=4).program
    absent = {"embed": {"tensor": "weights/absent", "onnx_dtype": 1, "shape": [4]}}
    with pytest.raises(PlanCorruptError, match="tensor 'weights/absent' is missing"):
        load_executor(make_plan(decoder, program={**program, "initializers": absent}))
    fewer = {**program["attention"], "layers": program["attention"]["layers"][:1]}
    with pytest.raises(PlanCorruptError, match="2 layers in the KV layout, 1 in the program"):
        load_executor(make_plan(decoder, program={**program, "attention": fewer}))


def test_a_program_onnxruntime_cannot_load_is_refused(decoder: Any, make_plan: Callable[..., Plan]) -> None:
    program = lower(decoder.graph(), block_size=4).program
    plan = make_plan(decoder, program={**program, "model": "weights/embed"})
    with pytest.raises(PlanTargetError, match="cannot load the program"):
        load_executor(plan)


def test_a_truncated_plan_and_another_format_are_refused(
    decoder: Any, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    data = make_plan(decoder).path.read_bytes()
    cut, other = tmp_path / "cut.plan", tmp_path / "other.plan"
    cut.write_bytes(data[:-100])
    other.write_bytes(data.replace(b'"optimc.format_version":"1"', b'"optimc.format_version":"9"'))
    with pytest.raises(PlanCorruptError, match="truncated"):
        Plan.open(cut)
    with pytest.raises(PlanVersionError, match="plan format 9"):
        Plan.open(other)


def test_a_plan_replaced_while_loading_is_noticed(
    tiny_decoder: Any, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    path = tmp_path / "engine.plan"
    shutil.copy(make_plan(tiny_decoder(seed=1)).path, path)
    plan = Plan.open(path)
    path.unlink()
    shutil.copy(make_plan(tiny_decoder(seed=2)).path, path)
    with pytest.raises(PlanTargetError, match="replaced by another plan"):
        load_executor(plan)


def test_a_plan_behind_a_symbolic_link_loads(decoder: Any, make_plan: Callable[..., Plan], tmp_path: Path) -> None:
    link = tmp_path / "link.plan"
    link.symlink_to(make_plan(decoder).path)
    assert load_executor(Plan.open(link), threads=1).pool.num_blocks > 0


def test_a_plan_that_vanished_is_an_error_in_words(
    decoder: Any, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    path = tmp_path / "engine.plan"
    shutil.copy(make_plan(decoder).path, path)
    plan = Plan.open(path)
    path.unlink()
    with pytest.raises(PlanError, match=r"engine\.plan"):
        load_executor(plan)


def test_a_failing_step_is_an_engine_error_and_the_next_one_works(
    decoder: Any, make_plan: Callable[..., Plan], cache_type: Any
) -> None:
    executor = load_executor(make_plan(decoder), threads=1)
    cache = cache_type(64, 4)
    with pytest.raises(EngineError, match="failed in a step of 2 tokens"):
        executor.execute(cache.step([("bad", np.array([1, 50_000]))]))
    tokens = np.arange(5)
    found = executor.execute(cache.step([("good", tokens)])).logits
    np.testing.assert_allclose(found, decoder.forward(tokens), atol=1e-4)


def test_onnx_is_not_needed_to_serve() -> None:
    assert PagedAttention.__module__.startswith("optimc_passes")
    source = Path(executor_module.__file__).parent
    for file in source.glob("*.py"):
        assert "import onnx\n" not in file.read_text()
        assert "optimc_passes" not in file.read_text()
