import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from optimc.errors import LoweringError
from optimc_passes.emit.tensorrt_kernels import paged_attention_plugin as plugin
from optimc_passes.emit.tensorrt_kernels import plugin_design as design
from optimc_passes.emit.tensorrt_kernels.attention_variant import AttentionVariant

from . import fake_plugin


def variant(**changes):
    usual = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "block_size": 16,
        "half": "float16",
        "pool": "float16",
        "scale": 128**-0.5,
        "softcap": 0.0,
        "window": 0,
        "has_tree": False,
    }
    return AttentionVariant(**(usual | changes))


VARIANTS = {
    "half": variant(),
    "int8 with a tree": variant(pool="int8", half="bfloat16", has_tree=True, window=4096),
    "wide heads": variant(num_heads=8, num_kv_heads=4, head_dim=256),
}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name == "wide heads" else name for name in VARIANTS]


def inputs_of(each, tokens, sequences):
    width, kv_width = each.num_heads * each.head_dim, each.num_kv_heads * each.head_dim
    shapes = {
        "q": (tokens, width),
        "step_keys": (tokens, kv_width),
        "step_values": (tokens, kv_width),
        "key_pool": (1000, kv_width),
        "value_pool": (1000, kv_width),
        "key_pool_scales": (1000, each.num_kv_heads),
        "value_pool_scales": (1000, each.num_kv_heads),
        "step_key_scales": (tokens, each.num_kv_heads),
        "step_value_scales": (tokens, each.num_kv_heads),
        "query_start": (sequences + 1,),
        "context_len": (sequences,),
        "block_table": (sequences, 77),
        "positions": (tokens,),
        "tree_mask": (tokens, 33),
    }
    return [(kind, shapes[name]) for name, kind in design.attention_inputs(each).items()]


@pytest.fixture(scope="module", params=[pytest.param(80, marks=pytest.mark.slow), 90])
def built(request):
    """Registers variants' plugins for one capability, each when it is first asked for."""
    trtp = fake_plugin.FakePlugins()

    def names(name):
        return plugin.register_attention(fake_plugin, trtp, VARIANTS[name], request.param)

    return SimpleNamespace(trtp=trtp, names=names, capability=request.param)


def assemble(ptx, capability, folder):
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    (folder / "kernel.ptx").write_text(ptx)
    gpu = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    command = [str(tool), f"--gpu-name={gpu}", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    subprocess.run(command, check=True, capture_output=True)
    return (folder / "kernel.cubin").read_bytes()


def parameters(ptx):
    """The types of the entry's parameters."""
    return re.findall(r"\.param \.(\w+)", ptx.split("\n)")[0])


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_inputs_then_sizes_then_outputs_and_the_edited_text_assembles(name, built, tmp_path):
    inputs = inputs_of(VARIANTS[name], 5, 3)
    shapes, _, launches = built.trtp.build(f"optimc::{built.names(name).attention}", inputs)
    assert len(launches) == 2
    for launch in launches.values():
        expected = ["u64"] * len(inputs) + ["u32"] * len(launch.extra) + ["u64"] * len(shapes)
        assert parameters(launch.ptx) == expected
        assert launch.params.block == (int(re.search(r"\.reqntid (\d+)", launch.ptx)[1]), 1, 1)
        assert launch.params.shared_mem <= plugin.SHARED_BYTES
        assert launch.name.encode() in assemble(launch.ptx, built.capability, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_what_attention_leaves_is_what_merge_takes(name, built, tmp_path):
    each, names = VARIANTS[name], built.names(name)
    parts, types, _ = built.trtp.build(f"optimc::{names.attention}", inputs_of(each, 5, 3))
    assert types == [*design.attention_inputs(each).values(), "FP32", "FP32"]
    out, types, launches = built.trtp.build(f"optimc::{names.merge}", parts)
    half = "BF16" if each.half == "bfloat16" else "FP16"
    assert out == [(half, (5, each.num_heads * each.head_dim))]
    assert types == ["FP32", "FP32", half]
    (launch,) = launches.values()
    assert launch.params.grid == (5 * each.num_heads, 1, 1)
    assert launch.extra == [5 * each.num_heads, parts[0][1][0]]
    assert parameters(launch.ptx) == ["u64", "u64", "u32", "u32", "u64"]
    assert launch.name.encode() in assemble(launch.ptx, built.capability, tmp_path)


def test_the_grid_has_a_tile_for_every_query_of_every_sequence(built):
    each = VARIANTS["half"]
    for counts in ([1], [1] * 7, [3, 1, 200, 5], [2048]):
        inputs = inputs_of(each, sum(counts), len(counts))
        _, _, launches = built.trtp.build(f"optimc::{built.names('half').attention}", inputs)
        for launch in launches.values():
            tiles, kv_heads, _ = launch.params.grid
            # Found by what the kernel computes with: it is told B and W, and has rows for 4 heads a query.
            assert kv_heads == 8
            assert launch.extra == [sum(counts), len(counts), 77, 0]
            for rows in (16, 32, 64, 128):
                if tiles == sum(counts) // (rows // 4) + len(counts):
                    assert tiles >= sum(-(-count // (rows // 4)) for count in counts)
                    break
            else:
                pytest.fail(f"{tiles} tiles for {counts}")


@pytest.mark.parametrize(
    ("tokens", "sequences", "parts"),
    [(1, 1, 32), (4, 1, 16), (2, 2, 16), (8, 8, 2), (32, 32, 1), (2048, 1, 1)],
)
def test_parts_fill_a_gpu_and_no_more(tokens, sequences, parts):
    each = VARIANTS["half"]
    assert design.num_splits(each, {"q": (tokens, 4096), "context_len": (sequences,)}) == parts
    programs = (tokens // 4 + sequences) * 8
    assert parts == 1 or parts * programs <= design.WANTED_PROGRAMS


def test_registering_again_changes_nothing(built):
    before = dict(built.trtp.plugins)
    again = plugin.register_attention(fake_plugin, built.trtp, VARIANTS["half"], built.capability)
    assert again == built.names("half")
    assert built.trtp.plugins == before


def test_different_kernels_have_different_names():
    names = {design.plugin_names(each, capability) for each in VARIANTS.values() for capability in (80, 90)}
    assert len(names) == 6


def test_fp8_is_refused_where_it_cannot_be_compiled():
    with pytest.raises(LoweringError, match="fp8 cache only from sm_89 on"):
        plugin.register_attention(fake_plugin, fake_plugin.FakePlugins(), variant(pool="fp8"), 80)


def test_without_full_tensorrt_there_is_no_plugin_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert plugin.find_plugin_module() is None


def test_a_tensorrt_without_ahead_of_time_plugins_has_none_either(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", SimpleNamespace(register=None))
    assert plugin.find_plugin_module() is None
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", fake_plugin.FakePlugins())
    assert plugin.find_plugin_module() is not None
