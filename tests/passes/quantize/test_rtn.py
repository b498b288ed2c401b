import numpy as np
import pytest

from optimc.errors import PassError
from optimc_passes.artifact import Artifact
from optimc_passes.base import PassContext
from optimc_passes.quantize.affine import quantize_affine
from optimc_passes.quantize.layer_report import packed_bytes, stored_bytes
from optimc_passes.quantize.rtn import Rtn, RtnConfig
from optimc_passes.weights import Dense, Quantized, WeightStore

Q0 = "model.layers.0.self_attn.q_proj.weight"
EMBED = "model.embed_tokens.weight"


def run(decoder, context=None, **options):
    artifact = Artifact.start(decoder.checkpoint())
    return Rtn(RtnConfig(**options))(artifact, context or PassContext())


def test_all_linear_layers_but_the_head_are_quantized(tiny_decoder):
    decoder = tiny_decoder()
    outcome = run(decoder, group_size=16)
    quantized = {name for name, weight in outcome.artifact.weights.items() if isinstance(weight, Quantized)}
    assert len(quantized) == 14
    assert all("_proj" in name for name in quantized)
    assert outcome.report.metrics["layers"] == 14
    assert outcome.report.decisions == ("lm_head is left as it is: ignored",)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_a_layer_is_what_rounding_to_nearest_gives(tiny_decoder, bits, symmetric, group_size):
    decoder = tiny_decoder()
    outcome = run(decoder, bits=bits, symmetric=symmetric, group_size=group_size, ragged="ragged")
    weight = outcome.artifact.weights[Q0]
    group = 32 if group_size == -1 else group_size
    codes, scales, zeros = quantize_affine(decoder.arrays[Q0], bits, group, symmetric=symmetric)
    assert (weight.bits, weight.group, weight.method, weight.symmetric) == (bits, group, "rtn", symmetric)
    assert np.array_equal(weight.codes.read(), codes)
    assert np.array_equal(weight.scales.read(), scales)
    assert symmetric or np.array_equal(weight.zeros.read(), zeros)


def test_the_error_of_each_layer_is_reported(tiny_decoder):
    decoder = tiny_decoder()
    outcome = run(decoder, group_size=16)
    weight = outcome.artifact.weights[Q0].dequantize()
    expected = np.linalg.norm(decoder.arrays[Q0] - weight) / np.linalg.norm(decoder.arrays[Q0])
    metrics = outcome.report.metrics
    rows = {row.layer: row for row in outcome.report.layers}
    assert rows["model.layers.0.self_attn.q_proj"].error == pytest.approx(expected, rel=1e-5)
    assert rows["model.layers.0.self_attn.q_proj"].bits == 4
    assert rows["model.layers.0.self_attn.q_proj"].group == 16
    assert rows[metrics["worst_layer"]].error == metrics["relative_error_max"]
    eight = run(decoder, group_size=16, bits=8).report.metrics
    # 17 times as many steps in the same range.
    assert metrics["relative_error_mean"] / eight["relative_error_mean"] == pytest.approx(17, rel=0.1)


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_lowers_the_squared_error_of_coarse_grids(tiny_decoder, symmetric):
    decoder = tiny_decoder()
    for bits, gain in ((2, 0.97), (3, 0.99)):
        plain, clipped = (
            run(decoder, bits=bits, symmetric=symmetric, group_size=16, clip=clip).report.metrics["relative_error_mean"]
            for clip in ("none", "mse")
        )
        assert clipped < gain * plain


def test_bytes_are_counted_as_served():
    weight = np.random.default_rng(0).standard_normal((6, 10)).astype(np.float32)
    codes, scales, zeros = quantize_affine(weight, 4, 4, symmetric=False)
    quantized = Quantized(Dense.of(codes), Dense.of(scales), Dense.of(zeros), 4, 4)
    # 60 codes and 18 zero points of half a byte, 18 scales of four.
    assert packed_bytes(quantized) == 39 + 72
    # Zero points take a byte there, scales two.
    assert stored_bytes(quantized) == 30 + 18 * 3


@pytest.mark.parametrize(("bits", "width"), [(2, 4), (3, 4), (4, 4), (8, 8)])
def test_narrow_codes_are_stored_in_four_bits(bits, width):
    weight = np.random.default_rng(0).standard_normal((6, 16)).astype(np.float32)
    codes, scales, _ = quantize_affine(weight, bits, 16, symmetric=True)
    quantized = Quantized(Dense.of(codes), Dense.of(scales), None, bits, 16)
    assert packed_bytes(quantized) == 96 * bits // 8 + 6 * 4
    assert stored_bytes(quantized) == 96 * width // 8 + 6 * 2


def test_compression_is_reported(tiny_decoder):
    decoder = tiny_decoder()
    metrics = run(decoder, group_size=16).report.metrics
    elements = sum(array.size for name, array in decoder.arrays.items() if "_proj" in name)
    assert metrics["bytes_before"] == 4 * elements
    assert metrics["bytes_after"] == elements / 2 + elements / 16 * 4.5


def test_groups_that_do_not_divide_stop_the_pass_before_any_weight_is_read(tiny_decoder):
    decoder = tiny_decoder()
    checkpoint = decoder.checkpoint()

    def read():
        raise AssertionError("data was read")

    lazy = WeightStore({n: Dense(w.shape, w.dtype, read) for n, w in checkpoint.weights.items()})
    artifact = Artifact.start(checkpoint).evolve(weights=lazy)
    with pytest.raises(PassError) as caught:
        Rtn(RtnConfig(group_size=32))(artifact, PassContext(done=("load",)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("rtn failed after [load]: 48 columns (2 layers, e.g. model.layers.0.mlp.down_proj): ")
    assert "not divisible by group_size 32; use 16" in lines[0]


def test_skip_reports_what_it_left_dense(tiny_decoder):
    outcome = run(tiny_decoder(), group_size=32, ragged="skip")
    assert outcome.report.metrics["skipped"] == 2
    assert "model.layers.1.mlp.down_proj stays dense: 48 columns not divisible by group_size 32" in (
        outcome.report.decisions
    )
    assert isinstance(outcome.artifact.weights["model.layers.1.mlp.down_proj.weight"], Dense)


def test_a_tied_head_is_quantized_apart_from_its_embedding(tiny_decoder):
    decoder = tiny_decoder(tied=True)
    outcome = run(decoder, group_size=16, ignore=())
    weights = outcome.artifact.weights
    assert weights[EMBED] is decoder.store[EMBED] or np.array_equal(weights[EMBED].read(), decoder.arrays[EMBED])
    assert isinstance(weights["lm_head.weight"], Quantized)
    assert any("lm_head is quantized apart from model.embed_tokens.weight" in text for text in outcome.report.decisions)
    # A second quantizing pass sees the head as it is now.
    with pytest.raises(PassError, match="quantized already: 15 layers, e.g. model.layers.0.self_attn.q_proj; "):
        Rtn(RtnConfig(group_size=16, ignore=()))(outcome.artifact)
    with pytest.raises(PassError, match="quantized already: lm_head; "):
        Rtn(RtnConfig(only=("lm_head",), ignore=()))(outcome.artifact)


@pytest.mark.parametrize("tied", [False, True])
def test_the_body_and_the_head_are_rounded_by_two_runs(tiny_decoder, tied):
    decoder = tiny_decoder(tied=tied)
    body = run(decoder, bits=4, group_size=16, symmetric=True)
    outcome = Rtn(RtnConfig(bits=8, group_size=32, symmetric=True, only=("lm_head",), ignore=()))(body.artifact)
    weights = outcome.artifact.weights
    head = weights["lm_head.weight"]
    assert (head.bits, head.group) == (8, 32)
    codes, _, _ = quantize_affine(decoder.arrays[EMBED if tied else "lm_head.weight"], 8, 32, symmetric=True)
    assert np.array_equal(head.codes.read(), codes)
    assert outcome.report.metrics["layers"] == 1
    assert not any("ignored" in text for text in outcome.report.decisions)
    # What the pass is not about is the very object it was.
    assert all(weights[name] is weight for name, weight in body.artifact.weights.items() if name != "lm_head.weight")


@pytest.mark.parametrize("tied", [False, True])
def test_the_embedding_is_rounded_where_it_is_named_and_a_tied_head_keeps_its_values(tiny_decoder, tied):
    decoder = tiny_decoder(tied=tied)
    outcome = run(decoder, bits=8, group_size=16, only=("embedding",))
    weights = outcome.artifact.weights
    codes, _, _ = quantize_affine(decoder.arrays[EMBED], 8, 16, symmetric=False)
    assert np.array_equal(weights[EMBED].codes.read(), codes)
    head = decoder.arrays[EMBED if tied else "lm_head.weight"]
    assert np.array_equal(weights["lm_head.weight"].read(), head)
    assert [row.layer for row in outcome.report.layers] == ["model.embed_tokens"]
    told = ("lm_head keeps the values of model.embed_tokens.weight, to which it was tied",) if tied else ()
    assert outcome.report.decisions == told
    # The head is still free to be rounded otherwise, from what it was.
    after = Rtn(RtnConfig(bits=4, group_size=16, only=("lm_head",), ignore=()))(outcome.artifact).artifact
    codes, _, _ = quantize_affine(head, 4, 16, symmetric=False)
    assert np.array_equal(after.weights["lm_head.weight"].codes.read(), codes)
    with pytest.raises(PassError, match="quantized already: model.embed_tokens; "):
        Rtn(RtnConfig(group_size=16, only=("embedding",)))(after)


def test_a_weight_that_is_not_finite_is_named(tiny_decoder):
    decoder = tiny_decoder()
    decoder.arrays[Q0][3, 3] = np.nan
    with pytest.raises(PassError, match=r"rtn failed after \[\]: .*q_proj.weight: 1 rows .* row 3"):
        run(decoder, group_size=16)


def test_finished_weights_are_handed_over_one_by_one(tiny_decoder):
    kept = []
    seen = []

    def keep(name, weight):
        kept.append(name)
        return weight

    context = PassContext(keep=keep, progress=lambda done, total, label: seen.append((done, total)))
    outcome = run(tiny_decoder(), context, group_size=16)
    assert len(kept) == 14
    assert set(kept) == {n for n, w in outcome.artifact.weights.items() if isinstance(w, Quantized)}
    assert seen == [(done, 14) for done in range(15)]


def test_bf16_weights_are_quantized_from_their_values(tiny_decoder):
    import ml_dtypes

    decoder = tiny_decoder()
    half = decoder.arrays[Q0].astype(ml_dtypes.bfloat16)
    artifact = Artifact.start(decoder.checkpoint())
    artifact = artifact.evolve(weights=artifact.weights.replace({Q0: Dense.of(half)}))
    weight = Rtn(RtnConfig(group_size=16))(artifact).artifact.weights[Q0]
    codes, _, _ = quantize_affine(half.astype(np.float32), 4, 16, symmetric=False)
    assert np.array_equal(weight.codes.read(), codes)
