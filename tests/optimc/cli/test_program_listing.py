"""The listing of a cpu plan's program, and what other plans answer."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from optimc.cli.app import app
from optimc.cli.program_listing import list_program, read_program
from optimc.errors import PlanCorruptError, PlanError
from optimc.plan import (
    FORMAT_VERSION,
    KvLayer,
    KvLayout,
    Limits,
    Manifest,
    ModelInfo,
    Plan,
    PlanTensor,
    Source,
    TargetInfo,
    TokenIds,
    write_plan,
)
from optimc.plan.cpu_program import (
    Attention,
    CpuHeads,
    CpuProgram,
    Embed,
    FloatBuffer,
    FloatWeight,
    IntWeight,
    Linear,
    Norm,
    QuantizedBuffer,
    Table,
    Vector,
    View,
)

STREAM = View(buffer=0, column=0, width=64)
SIZES = {"weights/embed": 100 * 64 * 4, "weights/norm": 64 * 4, "weights/qkv": 5000, "weights/head": 7000}
PROGRAM = CpuProgram(
    max_tokens=8,
    weights={
        "embed": Table(tensor="weights/embed", rows=100, features=64, dtype="float32"),
        "norm": Vector(tensor="weights/norm", length=64),
        "qkv": IntWeight(
            tensor="weights/qkv",
            outputs=128,
            features=64,
            group=32,
            bits=4,
            zeros=True,
            wide_scales=False,
            zero_point=0,
        ),
        "head": FloatWeight(tensor="weights/head", outputs=100, features=64, dtype="bfloat16"),
    },
    buffers=(
        FloatBuffer(name="stream", rows="tokens", width=64, offset=0),
        QuantizedBuffer(name="rounded", rows="tokens", features=64, group=32, offset=2048),
        FloatBuffer(name="qkv", rows="tokens", width=128, offset=4096),
        FloatBuffer(name="logits", rows="logits", width=100, offset=8192),
    ),
    arena_bytes=1 << 20,
    ops=(
        Embed(name="embed_tokens", table="embed", scale=1.0, out=STREAM),
        Norm(name="layers.0.norm", x=STREAM, weight="norm", epsilon=1e-5, heads=1, centred=False, quantized=1),
        Linear(
            name="model.layers.0.self_attn.q_proj+k_proj+v_proj",
            quantized=1,
            weight="qkv",
            out=View(buffer=2, column=0, width=128),
        ),
        Attention(
            name="attn",
            layer=0,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            scale=0.25,
            window=0,
            softcap=0.0,
            q=View(buffer=2, column=0, width=64),
            k=View(buffer=2, column=64, width=32),
            v=View(buffer=2, column=96, width=32),
            out=STREAM,
        ),
        Linear(name="lm_head", x=STREAM, weight="head", out=View(buffer=3, column=0, width=100)),
    ),
    logits=3,
)


def listing() -> list[str]:
    return list(list_program(PROGRAM, SIZES.__getitem__))


def test_operations_stand_with_flow_weights_and_bytes():
    assert [line.split() for line in listing()[1:4]] == [
        ["0", "embed", "embed_tokens", "->", "b0[T,", "64]", "float32", "256"],
        ["1", "norm", "layers.0.norm", "b0[T,", "64]", "->", "b1[T,", "64]", "256"],
        [
            *("2", "linear", "…f_attn.q_proj+k_proj+v_proj", "b1[T,", "64]", "->", "b2[T,", "128]"),
            *("int4", "g32", "zeros", "5,000"),
        ],
    ]


def test_columns_of_a_buffer_are_named():
    text = " ".join(line.strip() for line in listing()[4:8])
    assert text.startswith("3 attention")
    assert "b2[T, 0:64] b2[T, 64:96]" in text
    assert "b2[T, 96:128] -> b0[T, 64]" in text


def test_buffers_and_totals_follow():
    lines = listing()
    assert [line.split() for line in lines if line.startswith("b1")] == [
        ["b1", "2,048", "int8", "[T,", "64],", "a", "scale", "per", "32", "rounded"]
    ]
    assert lines[-2:] == [
        "5 operations, 4 buffers, arena 1.0 MiB for 8 tokens",
        "weights read for one decoded token: 12.2 KiB",  # a row of the table, a norm, two products
    ]


def test_a_line_has_at_most_100_characters():
    assert max(map(len, listing())) <= 100


def with_heads() -> CpuProgram:
    """The program with heads: one block on the stream, the output head again."""
    heads = CpuHeads(
        inputs=(STREAM,),
        logits=3,
        ops=(
            Linear(name="heads.blocks.0", x=STREAM, weight="qkv", out=View(buffer=2, column=0, width=128)),
            Linear(name="heads.projection", x=STREAM, weight="head", out=View(buffer=3, column=0, width=100)),
        ),
    )
    return PROGRAM.model_copy(update={"version": 2, "hidden": STREAM, "heads": heads})


def test_heads_stand_behind_the_model_with_their_own_total():
    lines = list(list_program(with_heads(), SIZES.__getitem__))
    at = lines.index("heads: hidden states -> b0[T, 64], candidates from b3[R, 100]")
    assert lines[:at] == [*listing()[: at - 1], ""]
    assert [line.split()[:3] for line in lines[at + 2 : at + 4]] == [
        ["0", "linear", "heads.blocks.0"],
        ["1", "linear", "heads.projection"],
    ]
    assert lines[-3:] == [
        "5 operations and 2 of the heads, 4 buffers, arena 1.0 MiB for 8 tokens",
        listing()[-1],
        "weights read for one draft: 11.7 KiB",
    ]
    assert max(map(len, lines)) <= 100


def written(path: Path, backend: str, program: dict) -> Path:
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="small",
        target=TargetInfo(backend=backend),
        model=ModelInfo(architecture="Small", vocab_size=100, hidden_size=64, num_layers=1),
        limits=Limits(max_seq_len=8, max_step_tokens=8, max_seqs=1, kv_memory_bytes=1),
        kv=KvLayout(block_size=4, dtype="float32", layers=(KvLayer(num_kv_heads=2, head_dim=16, window=0),)),
        tokens=TokenIds(bos=None, eos=(), pad=None),
        program=program,
        source=Source(
            model="m", model_hash="0", recipe={}, recipe_hash="0", calibration_hash=None, build_key="0", tools={}
        ),
    )
    tensors = [
        PlanTensor(name, "U8", (size,), lambda size=size: np.zeros(size, np.uint8)) for name, size in SIZES.items()
    ]
    write_plan(path, manifest, tensors)
    return path


def test_the_command_lists_and_gives_json(tmp_path: Path):
    path = written(tmp_path / "engine.plan", "cpu", PROGRAM.model_dump(mode="json"))
    shown = CliRunner().invoke(app, ["inspect", str(path), "--program"])
    assert shown.output.splitlines() == listing()
    as_json = CliRunner().invoke(app, ["inspect", str(path), "--program", "--json"])
    assert CpuProgram.model_validate(json.loads(as_json.output)) == PROGRAM


def test_a_plan_of_another_target_says_so(tmp_path: Path):
    path = written(tmp_path / "engine.plan", "onnxruntime", {})
    with pytest.raises(PlanError, match="built for target onnxruntime; only cpu and tensorrt have a program"):
        read_program(Plan.open(path))


def test_a_damaged_program_says_so(tmp_path: Path):
    path = written(tmp_path / "engine.plan", "cpu", {"version": 1})
    with pytest.raises(PlanCorruptError, match="program section is damaged"):
        read_program(Plan.open(path))
