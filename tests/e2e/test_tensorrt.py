"""A recipe becomes a plan for TensorRT on a machine without a GPU, and every command that would run it says in one line
what is missing."""

import random

import pytest

from optimc.errors import MissingExtraError
from optimc.plan import Plan
from optimc.plan.tensorrt_program import TensorRtProgram

pytest.importorskip("tensorrt_rtx")

RTX = {"backend": "tensorrt", "flavor": "rtx", "gpu": ["sm_89"]}
NO_GPU = "built for an NVIDIA GPU, and this machine has no"
HEADS = {
    "heads": 2,
    "draft_vocab": "all",
    "epochs": 1.0,
    "batch_tokens": 256,
    "data": {"chat_tokens": 0, "prose_tokens": 2_000},
}


def has_gpu() -> bool:
    from optimc.errors import LoweringError
    from optimc_passes.emit.tensorrt.local_gpu import local_architecture

    try:
        return bool(local_architecture())
    except LoweringError:
        return False


@pytest.fixture(scope="module")
def result(build):
    passes = [{"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}, "fuse"]
    return build("rtx-int4", target=RTX | {"kv_dtype": "int8"}, passes=passes)


def test_a_recipe_becomes_a_plan(result):
    manifest = result.manifest
    assert manifest.target.backend == "tensorrt"
    assert manifest.target.requirements["gpu"] == "sm_89"
    assert manifest.kv.dtypes == ("int8",)
    assert {"tensorrt-rtx", "triton"} <= manifest.source.tools.keys()
    with Plan.open(result.path, verify=True) as plan:
        program = TensorRtProgram.model_validate(plan.manifest.program)
        assert plan.tensor(program.model.tensor)[:4].tobytes() == b"vtrt"


def test_a_longest_sequence_the_recipe_leaves_open_is_the_models(build):
    limits = {"max_step_tokens": 64, "max_seqs": 16, "kv_memory": "4MiB"}
    program = TensorRtProgram.model_validate(build("rtx-long", target=RTX, limits=limits).manifest.program)
    assert program.model.profiles[0].largest["C"] == 512


def test_heads_are_trained_where_the_plan_cannot_run(build, tmp_path):
    text = tmp_path / "text.txt"
    rng = random.Random(3)
    text.write_text(" ".join(rng.choice(["what", "is", "the", "capital", "book"]) for _ in range(8_000)))
    calibration = {"dataset": str(text), "samples": 16, "seq_len": 128}
    made = build("rtx-medusa", target=RTX, calibration=calibration, passes=["fuse", {"medusa": HEADS}])
    assert made.manifest.medusa is not None
    program = TensorRtProgram.model_validate(made.manifest.program)
    assert program.heads is not None
    assert program.hidden is not None
    (report,) = (report for report in made.manifest.passes if report.name == "medusa")
    if not has_gpu():
        assert any("this machine has no NVIDIA GPU" in line for line in report.decisions)


@pytest.mark.parametrize("arguments", [(), ("--tensors",), ("--fusions",), ("--layers",), ("--json",), ("--verify",)])
def test_it_is_inspected_like_any_plan(cli, result, arguments):
    done = cli("inspect", result.path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_its_program_is_engines_profiles_caches_and_kernels(cli, result):
    lines = cli("inspect", result.path, "--program").stdout.splitlines()
    assert lines[0] == "flavor rtx, products and attention in float16"
    assert lines[1].startswith("model: program/model.engine, ")
    assert lines[2].startswith("  decode: T 1 to 64 (most likely 8), B 1 to 16 (most likely 8), Q 1 to 16 ")
    assert "attention to the whole context: 3 layers, caches of int8" in lines
    assert "kernel commit_rows: sm_89, ptx" in lines
    program = TensorRtProgram.model_validate_json(cli("inspect", result.path, "--program", "--json").stdout)
    assert program.flavor == "rtx"


@pytest.mark.skipif(has_gpu(), reason="is about machines without a GPU")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (("bench",), NO_GPU),
        (("serve",), NO_GPU),
        (("eval",), NO_GPU),
        (("chat", "-p", "hello"), NO_GPU),
        (("roofline",), "work is counted for cpu and onnxruntime only"),
        (("roofline", "--gpu", "L4"), "work is counted for cpu and onnxruntime only"),
    ],
)
def test_what_is_missing_is_one_line(cli, result, command, line):
    name, *rest = command
    done = cli(name, result.path, *rest)
    assert done.returncode == 2
    (error,) = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert line in error
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(has_gpu(), reason="is about machines without a GPU")
def test_full_tensorrt_is_refused_before_the_model_is_looked_at(make_recipe, tmp_path, cli):
    """Neither the module nor a GPU is here; whichever is missing first is said before an hour of passes."""
    recipe = make_recipe(tmp_path / "full.yaml", target={"backend": "tensorrt"}, model="nobody/nothing")
    done = cli("build", recipe, "--dry-run")
    assert done.returncode == 2
    assert "flavor tensorrt, needs tensorrt: pip install 'optimc[tensorrt]'" in done.stderr


def test_another_tensorrt_is_another_plan(result, monkeypatch, build):
    """A plan is up to date for the version of TensorRT that built it."""
    from optimc.build import manifest

    real = manifest.version
    monkeypatch.setattr(manifest, "version", lambda name: "0.0" if name == "tensorrt-rtx" else real(name))
    assert manifest.tool_versions("tensorrt")["tensorrt-rtx"] == "0.0"
    assert "tensorrt-rtx" not in manifest.tool_versions("cpu")


def test_without_the_extra_the_build_names_it(make_recipe, tmp_path, monkeypatch):
    import sys

    from optimc.build import BuildOptions, build_recipe

    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    recipe = make_recipe(tmp_path / "rtx.yaml", target=RTX)
    with pytest.raises(MissingExtraError, match=r"optimc\[rtx\]"):
        build_recipe(recipe, BuildOptions(output=tmp_path / "x.plan", cache_dir=tmp_path))
