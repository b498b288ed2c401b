import re
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimc.errors import CheckpointError, ConfigError, StorageError, VerifyError
from optimc_passes.artifact import Artifact
from optimc_passes.base import Pass, PassConfig, PassResult
from optimc_passes.cache import ArtifactCache
from optimc_passes.fuse import merge_qkv
from optimc_passes.fuse.merge_qkv import MergeQkv
from optimc_passes.graph.exported import Exported
from optimc_passes.graph.serialize import to_bytes
from optimc_passes.pipeline import GraphSource, PipelineOptions, check_order, run_pipeline
from optimc_passes.quantize.rtn import Rtn
from optimc_passes.registry import make_pass
from optimc_passes.verify.evaluate import evaluate
from optimc_passes.verify.probe import Probe
from optimc_passes.weights import Quantized


class Build:
    """A pipeline over one decoder, with counts of what was computed rather than found."""

    def __init__(self, decoder, monkeypatch, cache=None):
        self.decoder = decoder
        self.cache = cache
        self.computed = []
        for pass_type in (Rtn, MergeQkv):
            real = pass_type.run

            def run(pass_, artifact, context, real=real):
                self.computed.append(pass_.name)
                return real(pass_, artifact, context)

            monkeypatch.setattr(pass_type, "run", run)

    def export(self):
        self.computed.append("export")
        model = self.decoder.model
        return Exported(model, model.graph.num_nodes(), raw=model)

    def __call__(self, *specs, **options):
        self.computed.clear()
        passes = [make_pass(name, given) for name, given in specs]
        artifact = Artifact.start(self.decoder.checkpoint())
        options = PipelineOptions(**{"cache": self.cache, **options})
        return run_pipeline(passes, artifact, GraphSource("e" * 64, self.export), options)


@pytest.fixture
def build(tiny_decoder, monkeypatch):
    return Build(tiny_decoder(), monkeypatch)


@pytest.fixture
def cached(tiny_decoder, monkeypatch, tmp_path):
    return Build(tiny_decoder(), monkeypatch, ArtifactCache(tmp_path / "cache"))


INT4 = ("rtn", {"bits": 4, "group_size": 16})
COARSE = ("rtn", {"bits": 4, "group_size": 8})
QKV = ("merge_qkv", {})
GATE_UP = ("merge_gate_up", {})


def test_without_passes_the_graph_is_the_model(build):
    result = build()
    assert result.reports == ()
    assert len(result.artifact.graph.graph.inputs) == 3
    assert build.computed == ["export"]


def test_passes_run_in_order_and_report(build):
    result = build(INT4, QKV, GATE_UP)
    assert [report.name for report in result.reports] == ["rtn", "merge_qkv", "merge_gate_up"]
    assert [report.metrics.get("matched") for report in result.reports] == [None, 2, 2]
    assert all(0 <= report.metrics["verify_relative_error"] < 1e-5 for report in result.reports[1:])
    assert not any(report.cached for report in result.reports)
    products = [node for node in result.artifact.graph.graph if node.op_type == "MatMul"]
    assert len(products) == 9


HEAD = ("rtn", {"bits": 8, "group_size": 32, "symmetric": True, "only": ["lm_head"], "ignore": []})


def test_a_pass_may_run_twice_on_different_layers(build):
    seen = []
    result = build(INT4, HEAD, QKV, on_progress=lambda step, done, total, label: seen.append(step))
    assert [report.name for report in result.reports] == ["rtn", "rtn", "merge_qkv"]
    assert [report.metrics.get("layers") for report in result.reports] == [14, 1, None]
    bits = {name: weight.bits for name, weight in result.artifact.weights.items() if isinstance(weight, Quantized)}
    assert bits.pop("lm_head.weight") == 8
    assert list(bits.values()) == [4] * 14
    assert sorted(set(seen)) == ["export", "merge_qkv", "rtn (1 of 2)", "rtn (2 of 2)"]


def test_each_run_of_a_pass_is_cached_for_itself(cached):
    cached(INT4, HEAD)
    again = cached(INT4, HEAD)
    assert cached.computed == []
    assert [report.metrics["layers"] for report in again.reports] == [14, 1]
    assert [report.cached for report in again.reports] == [True, True]
    other = ("rtn", {**HEAD[1], "bits": 4})
    assert [report.cached for report in cached(INT4, other).reports] == [True, False]
    # The other order gives the same weights, but not from these results.
    assert [report.cached for report in cached(HEAD, INT4).reports] == [False, False]


def test_fusion_does_not_change_what_is_computed(build):
    probe = Probe.of_vocabulary(48, 20)
    plain, fused = (evaluate(build(INT4, *fusions).artifact.graph, probe) for fusions in ((), (QKV, GATE_UP)))
    # The same sums; a wider product may be cut into other tiles and round float32 otherwise.
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-5)


def test_a_weight_pass_after_a_graph_pass_is_refused(build):
    passes = [make_pass(name, options) for name, options in (QKV, INT4, GATE_UP, COARSE)]
    assert [index for index, _ in check_order(passes)] == [1, 3]
    with pytest.raises(ConfigError, match="rtn changes weights and must come before merge_qkv"):
        build(QKV, INT4)
    assert build.computed == []


def test_a_wrong_fusion_is_caught_and_named(build, monkeypatch):
    real = merge_qkv.merge

    def wrong(op, projections):
        q, k, v = projections
        return real(op, [q, k, replace(v, parts=k.parts)])

    monkeypatch.setattr(merge_qkv, "merge", wrong)
    with pytest.raises(VerifyError, match=r"^merge_qkv failed after \[merge_gate_up\]: logits changed by") as caught:
        build(GATE_UP, QKV)
    # The product is new; the values split off it have their old names again.
    assert re.fullmatch(r"model\.layers\.0\.self_attn\..*/Split", caught.value.node)
    assert "through new nodes 'model.layers.0.self_attn." in str(caught.value)


class Tamper(Pass[PassConfig]):
    """Rewrites layer 1 of the tiny decoder wrongly, as subclasses say."""

    name, version, stage, config_type = "tamper", 1, "graph", PassConfig

    def run(self, artifact, context):
        products = [node for node in artifact.graph.graph if node.op_type == "MatMul"]
        self.tamper(*products[11:13])  # seven a layer; gate and up are the fifth and sixth
        return PassResult(artifact)


class ExchangeGateAndUp(Tamper):
    """Sound, but another function."""

    def tamper(self, gate, up):
        weights = gate.inputs[1], up.inputs[1]
        gate.replace_input_with(1, weights[1])
        up.replace_input_with(1, weights[0])


class DeclareAnotherWidth(Tamper):
    """Computes what it did, and says something else of the product's activation."""

    def tamper(self, gate, up):
        sigmoid = next(node for node, _ in gate.outputs[0].uses() if node.op_type == "Sigmoid")
        sigmoid.outputs[0].shape = ir.Shape([1, "T", 47])


@pytest.mark.parametrize(
    ("tampering", "op", "said"),
    [
        (ExchangeGateAndUp, "MatMul", r"logits changed by .* first at node 'node_MatMul_45' MatMul"),
        (
            DeclareAnotherWidth,
            "Sigmoid",
            r"node 34 Sigmoid 'node_Sigmoid_46': .* declares \[1,T,47\], computes \[1,T,48\]",
        ),
    ],
)
def test_a_planted_fault_is_located_by_name(build, tampering, op, said):
    artifact = Artifact.start(build.decoder.checkpoint())
    with pytest.raises(VerifyError, match=said) as caught:
        run_pipeline([tampering(PassConfig())], artifact, GraphSource("key", build.export))
    assert caught.value.name == "tamper"
    assert op in caught.value.node


def test_weights_and_graph_that_do_not_fit_are_refused(build):
    build.decoder.arrays["stray"] = np.zeros(2, np.float32)
    with pytest.raises(CheckpointError, match="stray"):
        build()


def test_a_tied_head_that_was_quantized_is_attached_beside_its_embedding(tiny_decoder, monkeypatch):
    build = Build(tiny_decoder(tied=True), monkeypatch)
    result = build(("rtn", {"group_size": 16, "ignore": []}), QKV)
    initializers = result.artifact.graph.graph.initializers
    assert "lm_head.weight.codes" in initializers
    embedding = initializers["model.embed_tokens.weight"].const_value.numpy()
    assert np.array_equal(embedding, build.decoder.arrays["model.embed_tokens.weight"])


def test_the_same_build_again_computes_nothing_and_gives_the_same_bytes(cached):
    first = cached(INT4, QKV)
    assert cached.computed == ["rtn", "export", "merge_qkv"]
    second = cached(INT4, QKV)
    assert cached.computed == []
    assert [report.cached for report in second.reports] == [True, True]
    assert second.reports == tuple(report.model_copy(update={"cached": True}) for report in first.reports)
    assert second.artifact.key == first.artifact.key
    assert to_bytes(second.artifact.graph) == to_bytes(first.artifact.graph)
    left, right = (result.artifact.graph.graph.initializers for result in (first, second))
    assert list(left) == list(right)
    assert all(left[name].const_value.tobytes() == right[name].const_value.tobytes() for name in left)


def test_what_comes_from_the_cache_is_what_a_build_without_one_computes(cached, tiny_decoder, monkeypatch):
    cached(INT4, QKV)
    found = cached(INT4, QKV).artifact
    plain = Build(tiny_decoder(), monkeypatch)(INT4, QKV).artifact
    assert found.key == plain.key
    assert to_bytes(found.graph) == to_bytes(plain.graph)
    for name, value in plain.graph.graph.initializers.items():
        assert found.graph.graph.initializers[name].const_value.tobytes() == value.const_value.tobytes()


def test_another_group_size_is_another_result_but_the_export_is_shared(cached):
    cached(INT4, QKV)
    coarse = cached(COARSE, QKV)
    assert cached.computed == ["rtn", "merge_qkv"]
    assert coarse.artifact.weights["model.layers.0.mlp.up_proj.weight"].group == 8


def test_recipes_share_the_passes_they_begin_with(cached):
    cached(INT4)
    assert cached.computed == ["rtn", "export"]
    result = cached(INT4, QKV)
    assert cached.computed == ["merge_qkv"]
    assert [report.cached for report in result.reports] == [True, False]


def test_another_checkpoint_shares_no_weights(cached, tiny_decoder, monkeypatch):
    cached(INT4)
    checkpoint = cached.decoder.checkpoint
    cached.decoder.checkpoint = lambda: checkpoint(digest="f" * 64)
    cached(INT4)
    assert cached.computed == ["rtn"]


def test_a_graph_verified_less_does_not_stand_in_for_one_verified_more(cached):
    cached(QKV, verify="shapes")
    assert "verify_relative_error" not in cached(QKV, verify="shapes").reports[0].metrics
    assert cached.computed == []
    assert "verify_relative_error" in cached(QKV, verify="numeric").reports[0].metrics
    assert cached.computed == ["merge_qkv"]


def test_a_failed_build_leaves_no_entry_and_is_repeated(cached, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Rtn, "ensures", lambda *_: ["nothing is right"])
        with pytest.raises(Exception, match="nothing is right"):
            cached(INT4)
    cached(INT4)
    assert cached.computed == ["rtn", "export"]


def test_quantized_weights_are_read_from_the_cache_and_not_held(cached):
    weight = cached(INT4).artifact.weights["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(weight, Quantized)
    array = weight.codes.read()
    while not isinstance(array, np.memmap):
        array = array.base
    assert "cache" in str(array.filename)


def test_the_graph_is_dumped_after_each_phase_as_text_and_without_weights(build, tmp_path):
    build(INT4, QKV, GATE_UP, dump_graph=tmp_path / "dump")
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    phases = ("00-exported", "01-cleaned", "02-attached", "03-merge_qkv", "04-merge_gate_up")
    assert names == [f"{phase}.{ending}" for phase in phases for ending in ("onnx", "txt")]
    for phase in phases:
        assert "PagedAttention(" in (tmp_path / "dump" / f"{phase}.txt").read_text()
    before, after = (onnx.load(tmp_path / "dump" / f"{phase}.onnx") for phase in (phases[2], phases[4]))
    assert len(after.graph.node) < len(before.graph.node)
    assert (tmp_path / "dump" / "02-attached.onnx").stat().st_size < 40_000


def test_a_dump_reads_one_line_a_node_and_says_how_weights_are_stored(build, tmp_path):
    build(INT4, dump_graph=tmp_path)
    text = (tmp_path / "02-attached.txt").read_text()
    assert "input   input_ids: int64 [T]" in text
    assert "output  logits: float [R,48]" in text
    assert text.count(" = MatMul(") == 15
    codes = "weight    model.layers.1.mlp.up_proj.weight.codes: uint4 [32,48]"
    assert f"{codes} = Codes(name='model.layers.1.mlp.up_proj.weight')" in text
    assert "constant  constant_0: int64 [1] = [0]" in text
    weights = [line for line in text.splitlines() if line.startswith("weight")]
    assert all(len(line) < 200 for line in weights), "no data"


def test_an_export_from_the_cache_has_no_raw_form_to_dump_and_says_so(cached, tmp_path):
    cached(QKV)
    cached(QKV, dump_graph=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"00-exported.txt", "01-cleaned.onnx", "02-attached.onnx", "03-merge_qkv.onnx"} < names
    assert "00-exported.onnx" not in names
    assert "--fresh" in (tmp_path / "00-exported.txt").read_text()


def test_the_report_counts_nodes_and_seconds_on_the_graphs_way(cached):
    graph = cached(QKV, GATE_UP).graph
    counts = (graph.exported_nodes, graph.cleaned_nodes, graph.attached_nodes, graph.fused_nodes)
    # Attaching turns 15 transposes of weights into weights; each merge of three or two products adds a Split.
    assert counts == (59, 59, 44, 44 - 2 * (2 - 1))
    assert graph.graph_seconds > 0
    assert graph.frontend == {}
    again = cached(QKV, GATE_UP).graph
    assert again.export_seconds == graph.export_seconds, "what it cost when it was made"
    assert (again.exported_nodes, again.fused_nodes) == (counts[0], counts[3])


def test_every_graph_pass_accounts_for_operators_traffic_and_error(build):
    reports = build(INT4, QKV, GATE_UP).reports
    assert reports[0].fusion is None, "a weight pass"
    for report in reports[1:]:
        fusion = report.fusion
        assert fusion.matched == 2
        assert fusion.relative_error == report.metrics["verify_relative_error"]
        assert fusion.ops_after["MatMul"] < fusion.ops_before["MatMul"]
        assert fusion.ops_after["Split"] == fusion.ops_before.get("Split", 0) + 2
    assert reports[1].fusion.ops_after == reports[2].fusion.ops_before


def test_what_passes_did_is_known_from_the_cache_too(cached):
    first, second = cached(QKV), cached(QKV)
    assert second.reports[0].cached
    assert second.reports[0].fusion == first.reports[0].fusion
    assert second.reports[0].fusion.matched == 2


def test_progress_names_the_step(build):
    seen = []
    build(INT4, QKV, on_progress=lambda step, done, total, label: seen.append((step, done, total)))
    steps = [step for step, _, _ in seen]
    assert list(dict.fromkeys(steps)) == ["rtn", "export", "merge_qkv"]
    assert ("rtn", 14, 14) in seen
    assert any(step == "merge_qkv" and done == total for step, done, total in seen)


def test_work_that_begins_again_is_told_apart():
    seen = []
    progress = PipelineOptions(on_progress=lambda *told: seen.append(told)).progress_of("medusa")
    for told in [(0, 2, "sample"), (2, 2, "sample"), (2, 2, ""), (1, 9, "train"), (9, 9, "train"), (0, 1, "measure")]:
        progress(*told)
    assert [step for step, *_ in seen] == ["medusa"] * 3 + ["medusa: train"] * 2 + ["medusa: measure"]


def test_a_graph_without_passes_must_give_numbers_too(tiny_decoder):
    decoder = tiny_decoder()
    # Finite weights whose products are not.
    decoder.arrays["model.norm.weight"][:] = 1e38
    decoder.arrays["lm_head.weight"][:] = 1e38
    source = GraphSource("key", lambda: Exported.of(decoder.model))
    artifact = Artifact.start(decoder.checkpoint())
    with pytest.raises(VerifyError, match=r"^attach failed after \[\]: logits on probe tokens are not finite"):
        run_pipeline([], artifact, source)
    run_pipeline([], artifact, source, PipelineOptions(verify="shapes"))


def test_a_folder_that_takes_no_graphs_is_named(tiny_decoder, tmp_path):
    decoder = tiny_decoder()
    (tmp_path / "file").write_text("")
    options = PipelineOptions(verify="off", dump_graph=tmp_path / "file")
    source = GraphSource("key", lambda: Exported.of(decoder.model))
    with pytest.raises(StorageError, match=r"the graph cannot be written to .*file: File exists"):
        run_pipeline([], Artifact.start(decoder.checkpoint()), source, options)
