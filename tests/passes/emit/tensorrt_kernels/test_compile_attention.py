import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from optimc.errors import LoweringError
from optimc.plan import KvLayer, KvLayout
from optimc_passes.dialect.paged_attention import PagedAttention
from optimc_passes.emit.tensorrt_kernels.attention_tiles import attention_tile, shared_bytes, smaller_tile
from optimc_passes.emit.tensorrt_kernels.attention_variant import attention_variants
from optimc_passes.emit.tensorrt_kernels.compile_attention import compile_attention, compile_paged_attention
from optimc_passes.emit.tensorrt_kernels.compile_source import capability_of
from optimc_passes.emit.tensorrt_kernels.plan_kernels import plan_kernels

ARCHITECTURES = ("sm_80", "sm_89", "sm_90")


def layout(*layers, dtype="float32", block_size=16):
    """Layers as (key/value heads, head dim, window)."""
    kv = [KvLayer(num_kv_heads=h, head_dim=d, window=w) for h, d, w in layers]
    return KvLayout(block_size=block_size, dtype=dtype, layers=tuple(kv))


def specs(heads, kv, softcap=0.0):
    return [
        PagedAttention(i, heads, each.num_kv_heads, each.head_dim, each.head_dim**-0.5, each.window, softcap)
        for i, each in enumerate(kv.layers)
    ]


def spills(image, folder):
    """Bytes of registers a thread keeps in memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "x.cubin").write_bytes(image)
    command = [str(tool), "--dump-resource-usage", str(folder / "x.cubin")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", listing)[1])


def test_layers_that_are_alike_share_their_kernels():
    kv = layout((2, 64, 0), (2, 64, 512), (2, 64, 0), (2, 64, 512))
    full, windowed = compile_paged_attention(kv, specs(6, kv), "float16", ["sm_90"])
    assert (full.layers, windowed.layers) == ((0, 2), (1, 3))
    assert full.merge.image == windowed.merge.image, "windows do not concern what joins parts"
    images = [each for kernels in (full, windowed) for each in (kernels.decode.kernel, kernels.merge)]
    tensors, entries = plan_kernels(images)
    assert [tensor.name for tensor in tensors] == [f"kernels/{n}.sm_90" for n in ("decode/0", "merge/0", "decode/1")]
    assert [entry.tensor for entry in entries][3] == "kernels/merge/0.sm_90"


POOLS = {"float32": "*fp16", "int8": "*i8", "fp8": "*fp8e4nv"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_every_pool_compiles_for_every_architecture_that_can_read_it(architecture, dtype, tmp_path):
    kv = layout((2, 128, 0), dtype=dtype)
    if (dtype, architecture) == ("fp8", "sm_80"):
        with pytest.raises(LoweringError, match="layer 0: .* fp8 cache only from sm_89 on, not on sm_80"):
            compile_paged_attention(kv, specs(8, kv), "float16", [architecture])
        return
    (kernels,) = compile_paged_attention(kv, specs(8, kv, softcap=30.0), "float16", [architecture], has_tree=True)
    for kernel in (kernels.decode.kernel, kernels.merge, kernels.prefill.kernel):
        assert kernel.image[:4] == b"\x7fELF"
        assert kernel.function.encode() in kernel.image
        assert kernel.shared_bytes <= shared_bytes(capability_of(architecture))
        assert spills(kernel.image, tmp_path) <= 64
    scales = () if dtype == "float32" else ("*fp16",) * 4
    assert kernels.decode.kernel.arguments == (
        *("*fp16", *(POOLS[dtype],) * 4, *scales, "*i32", "*i32", "*i32", "*i64", "*u8"),
        *("i32", "i32", "i32", "i32", "*fp32", "*fp32", "*i8", "*i8"),
    )
    assert kernels.prefill.kernel.arguments[-3:] == ("*fp16", "*i8", "*i8")


def test_an_fp8_pool_compiles_for_sm_90():
    kv = layout((1, 64, 0), dtype="fp8")
    (variant,) = attention_variants(kv, specs(1, kv), "bfloat16", has_tree=False)
    compiled = compile_attention("x", variant, "decode", "sm_90", split=True)
    assert compiled.kernel.arguments[:5] == ("*bf16", *("*fp8e4nv",) * 4)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_head_size_compiles_without_spilling_much(head_dim, group, dtype, architecture, tmp_path):
    kv = layout((2, head_dim, 1024), dtype=dtype)
    (variant,) = attention_variants(kv, specs(2 * group, kv), "float16", has_tree=True)
    for purpose in ("decode", "prefill"):
        kernel = compile_attention("x", variant, purpose, architecture, split=purpose == "decode").kernel
        # A few registers around the loops; inside them it would be hundreds.
        assert spills(kernel.image, tmp_path) <= 256, purpose


@pytest.mark.parametrize(
    ("kv", "heads", "message"),
    [
        (layout((2, 64, 0), dtype="int4"), 4, "layer 0: .* no int4 cache; use int8"),
        (layout((1, 64, 0)), 71, "71 query heads on 1 key/value heads, .* at most 64"),
        (
            KvLayout(
                block_size=16,
                dtype="int8",
                layers=(KvLayer(num_kv_heads=1, head_dim=64, window=0, keys="channel", key_scales="s"),),
            ),
            4,
            "layer 0: .* scales per token, not per channel",
        ),
    ],
    ids=["int4", "too many heads", "keys per channel"],
)
def test_caches_the_kernel_cannot_read_are_refused_before_anything_is_compiled(kv, heads, message):
    with pytest.raises(LoweringError, match=message):
        compile_paged_attention(kv, specs(heads, kv), "float16", ["sm_80"])


def test_tiles_shrink_until_they_fit_and_then_it_is_said():
    kv = layout((2, 256, 0))
    (variant,) = attention_variants(kv, specs(4, kv), "float16", has_tree=False)
    usual = attention_tile(variant, "prefill", 80)
    compiled = compile_attention("x", variant, "prefill", "sm_80", split=True, shared_limit=49152)
    assert compiled.kernel.shared_bytes <= 49152
    tile = compiled.tile
    assert (tile.rows, tile.keys, tile.num_stages) < (usual.rows, usual.keys, usual.num_stages)
    with pytest.raises(LoweringError, match=r"x: heads of 256 need \d+ bytes of shared memory on sm_80, .* 1000"):
        compile_attention("x", variant, "decode", "sm_80", split=True, shared_limit=1000)


@pytest.mark.parametrize("group", [1, 3, 8, 20])
def test_tiles_hold_a_group_and_are_powers_of_two(group):
    kv = layout((2, 128, 0))
    (variant,) = attention_variants(kv, specs(2 * group, kv), "float16", has_tree=False)
    for purpose in ("decode", "prefill"):
        tile = attention_tile(variant, purpose, 90)
        while tile is not None:
            assert tile.rows >= max(16, group)
            assert tile.rows & (tile.rows - 1) == 0
            assert tile.keys >= 16
            tile = smaller_tile(tile, group)
