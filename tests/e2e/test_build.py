"""From a recipe to a plan: what is in it, what is reused, what it computes."""

import json

import numpy as np
import pytest
import torch

from optimc.build import BuildOptions, build_recipe, plan_build
from optimc.errors import LoweringError, PassError, VerifyError
from optimc.plan import Plan
from optimc_passes.fuse.pipeline import GRAPH_PASSES
from optimc_runtime.engine import Engine

FUSIONS = tuple(pass_type.name for pass_type in GRAPH_PASSES)
TOKENS = np.random.default_rng(3).integers(2, 380, 150)


@pytest.fixture(scope="module")
def expected(tiny_model):
    with torch.no_grad():
        return tiny_model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()


def score(path):
    engine = Engine.load(path)
    try:
        return engine.score(TOKENS.tolist())
    finally:
        engine.close()


def test_the_served_fp32_plan_equals_transformers(fp32_plan, expected):
    logits = score(fp32_plan)
    # Float32 rounding leaves about 1e-6 of the largest logit; 1e-4 is what we promise.
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_served_int4_plan_equals_transformers_with_the_rounded_weights(
    int4_plan, tiny_model, tiny_folder, cache_dir
):
    from optimc_passes.artifact import Artifact
    from optimc_passes.load import load_checkpoint
    from optimc_passes.registry import make_pass
    from optimc_passes.weights import Quantized

    checkpoint = load_checkpoint(tiny_folder, cache_dir=cache_dir)
    rounded = make_pass("rtn", {"bits": 4, "group_size": 32, "symmetric": False})(Artifact.start(checkpoint)).artifact
    state = {
        name: torch.from_numpy(np.array(weight.dequantize() if isinstance(weight, Quantized) else weight.read()))
        for name, weight in rounded.weights.items()
    }
    assert sum(isinstance(weight, Quantized) for weight in rounded.weights.values()) == 3 * 7
    original = {name: tensor.clone() for name, tensor in tiny_model.state_dict().items()}
    try:
        tiny_model.load_state_dict(state)
        with torch.no_grad():
            expected = tiny_model(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    finally:
        tiny_model.load_state_dict(original)
    logits = score(int4_plan)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_plan_says_what_it_is(int4_plan, tiny_folder):
    with Plan.open(int4_plan, verify=True) as plan:
        manifest = plan.manifest
        assert manifest.name == "int4"
        assert manifest.source.model == str(tiny_folder)
        assert [report.name for report in manifest.passes] == ["rtn", *FUSIONS]
        assert manifest.quantization["model.layers.0.self_attn.q_proj.weight"] == {
            "method": "rtn",
            "bits": 4,
            "group": 32,
            "symmetric": False,
        }
        assert manifest.tokens.eos == (1,)
        assert manifest.limits.max_seq_len == 256
        assert "<|start|>" in plan.blob("tokenizer/chat_template.jinja").decode()


def test_inspect_says_it_in_words(cli, int4_plan):
    listing = cli("inspect", int4_plan, env={"COLUMNS": "300"}).stdout
    for words in (
        "21 × rtn 4-bit asymmetric group 32",
        "bits: 4",
        "only: [*], ignore: [lm_head]",
        "size before",
        "KiB",
    ):
        assert words in listing


def test_quantized_linears_are_packed_on_disk(fp32_plan, int4_plan):
    def linear_bytes(path):
        with Plan.open(path) as plan:
            return sum(spec.nbytes for spec in plan if "_proj" in spec.name)

    # Half a byte a weight, plus a float32 scale and half a byte of zero point for each group of 32: 0.64 of 4 bytes.
    assert linear_bytes(int4_plan) < 0.17 * linear_bytes(fp32_plan)


def test_a_second_build_is_up_to_date_and_fresh_builds_the_same_bytes(make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "again.yaml")
    options = BuildOptions(output=tmp_path / "again.plan", cache_dir=cache_dir)
    first = build_recipe(recipe, options)
    assert not first.up_to_date
    assert build_recipe(recipe, options).up_to_date
    with Plan.open(first.path) as plan:
        content = plan.content_hash
    fresh = build_recipe(recipe, BuildOptions(output=options.output, cache_dir=cache_dir, fresh=True))
    assert not fresh.up_to_date
    with Plan.open(fresh.path) as plan:
        assert plan.content_hash == content
    changed = build_recipe(
        recipe, BuildOptions(output=options.output, cache_dir=cache_dir, overrides=("limits.max_seqs=3",))
    )
    assert not changed.up_to_date
    assert changed.manifest.limits.max_seqs == 3


def test_recipes_share_the_work_they_have_in_common(build, fp32_plan, int4_plan):
    rtn = {"rtn": {"bits": 4, "group_size": 32, "symmetric": False}}
    shared = build("shared", passes=[rtn, {"fuse": {"skip": ["remove_dead_nodes"]}}]).manifest
    assert all(report.cached for report in shared.passes)
    other = build("other", passes=[{"rtn": {"bits": 4, "group_size": 16, "symmetric": False}}, "merge_qkv"]).manifest
    assert [report.cached for report in other.passes] == [False, False]


def test_a_head_of_its_own_precision_takes_a_second_run_of_the_pass(build):
    body = {"rtn": {"bits": 4, "group_size": 32, "symmetric": True}}
    head = {"rtn": {"bits": 8, "group_size": 64, "symmetric": True, "only": ["lm_head"], "ignore": []}}
    target = {"int8_activations": False}
    mixed = build("mixed", passes=[body, head, "merge_qkv"], target=target).manifest
    assert [(report.name, report.metrics.get("layers")) for report in mixed.passes[:2]] == [("rtn", 21), ("rtn", 1)]
    assert mixed.quantization["lm_head.weight"] == {"method": "rtn", "bits": 8, "group": 64, "symmetric": True}
    assert {scheme["bits"] for name, scheme in mixed.quantization.items() if name != "lm_head.weight"} == {4}
    # The body's rounding is found in the cache, whatever follows it.
    coarse = {"rtn": {**head["rtn"], "bits": 4}}
    other = build("coarse", passes=[body, coarse, "merge_qkv"], target=target).manifest
    assert [report.cached for report in other.passes] == [True, False, False]


def test_a_failed_build_leaves_the_old_plan_and_nothing_else(make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "r.yaml")
    options = BuildOptions(output=tmp_path / "out" / "r.plan", cache_dir=cache_dir)
    build_recipe(recipe, options)
    before = options.output.read_bytes()
    with pytest.raises(PassError, match=r"rtn failed after \[\].*not divisible|rtn failed after \[\]"):
        build_recipe(make_recipe(recipe, passes=[{"rtn": {"group_size": 48}}]), options)
    assert options.output.read_bytes() == before
    assert [path.name for path in options.output.parent.iterdir()] == ["r.plan"]


def test_dump_graph_leaves_text_and_onnx_after_each_phase(make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "r.yaml")
    build_recipe(recipe, BuildOptions(output=tmp_path / "r.plan", cache_dir=cache_dir, dump_graph=tmp_path / "graphs"))
    phases = ["exported", "cleaned", "attached", *FUSIONS]
    names = {f"{number:02d}-{phase}" for number, phase in enumerate(phases)}
    left = {path.name for path in (tmp_path / "graphs").iterdir()}
    assert {f"{name}.txt" for name in names} <= left
    # The export comes from the cache that all tests here share: its raw form may be gone.
    assert {f"{name}.onnx" for name in names if name != "00-exported"} <= left
    assert "PagedAttention" in (tmp_path / "graphs" / "02-attached.txt").read_text()


def test_a_dry_run_reads_no_weights_and_writes_nothing(make_recipe, tiny_folder, tmp_path):
    folder = tmp_path / "weightless"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    recipe = make_recipe(tmp_path / "r.yaml", model=str(folder))
    outline = plan_build(recipe, BuildOptions(output=tmp_path / "r.plan", cache_dir=tmp_path / "cache"))
    assert outline.architecture == "LlamaForCausalLM"
    assert outline.passes == FUSIONS
    assert json.dumps(outline.to_json())
    assert not (tmp_path / "r.plan").exists()
    assert not (tmp_path / "cache").exists()


def test_the_plan_says_what_happened_to_its_graph(cli, int4_plan):
    with Plan.open(int4_plan) as plan:
        graph = plan.manifest.graph
        assert graph.exported_nodes > graph.cleaned_nodes > graph.attached_nodes > graph.fused_nodes
        assert graph.frontend["rope"].matched == 6, "q and k of three layers"
        fusions = {report.name: report.fusion for report in plan.manifest.passes if report.fusion}
    assert [fusions[name].matched for name in ("merge_qkv", "merge_gate_up", "rotary_qkv", "swiglu")] == [3] * 4
    assert all(fusion.relative_error <= 1e-5 for fusion in fusions.values())
    assert fusions["swiglu"].traffic_after_bytes < fusions["swiglu"].traffic_before_bytes
    listing = cli("inspect", int4_plan, "--fusions", env={"COLUMNS": "300"}).stdout
    assert all(name in listing for name in FUSIONS)
    assert "geglu (graph): 0 matched" in cli("inspect", int4_plan, "--why", "geglu").stdout


def test_two_plans_are_compared(cli, fp32_plan, int4_plan):
    listing = cli("inspect", fp32_plan, int4_plan).stdout
    assert "  + rtn  version: " in listing
    (bits,) = (line for line in listing.splitlines() if line.startswith("  bits none → 4: "))
    assert bits.endswith("_proj.weight and 20 more")
    assert cli("inspect", int4_plan, int4_plan).stdout.startswith("no difference")


def test_a_rewrite_that_is_skipped_leaves_the_engine_as_good(build, expected):
    plan = build("unfused", passes=[{"fuse": {"skip": ["swiglu", "add_rms_norm"]}}])
    assert not {"swiglu", "add_rms_norm"} & {report.name for report in plan.manifest.passes}
    assert np.abs(score(plan.path) - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_command_dumps_the_program_too(cli, make_recipe, cache_dir, tmp_path):
    recipe = make_recipe(tmp_path / "r.yaml")
    folder = tmp_path / "graphs"
    cli("build", recipe, "-o", tmp_path / "r.plan", "--cache-dir", cache_dir, "--dump-graph", folder)
    assert (folder / "program.txt").read_text() == cli("inspect", tmp_path / "r.plan", "--program").stdout
    assert f"{len(FUSIONS) + 2:02d}-{FUSIONS[-1]}.onnx" in {path.name for path in folder.iterdir()}


OWN_PASS = '''
from optimc_passes.base import Pass, PassResult
from optimc_passes.fuse.rule import NoOptions


class Rename(Pass[NoOptions]):
    """Gives the first node another name."""

    name, version, stage, config_type = "rename_first", 1, "graph", NoOptions

    def run(self, artifact, context):
        artifact.graph.graph[0].name = "first"
        return PassResult(artifact, {"renamed": 1})
'''


def test_a_pass_of_ones_own_is_built_in_and_editing_it_builds_again(make_recipe, cache_dir, tmp_path):
    folder = tmp_path / "recipes"
    folder.mkdir()
    recipe = make_recipe(folder / "r.yaml", passes=["fuse", "own:Rename"])
    options = BuildOptions(output=tmp_path / "r.plan", cache_dir=cache_dir)
    own = folder / "own.py"
    own.write_text(OWN_PASS)
    first = build_recipe(recipe, options)
    report = first.manifest.passes[-1]
    assert (report.name, report.metrics["renamed"], report.fusion.relative_error) == ("rename_first", 1, 0)
    assert build_recipe(recipe, options).up_to_date
    own.write_text(OWN_PASS.replace('"first"', '"other"'))
    again = build_recipe(recipe, options)
    assert not again.up_to_date
    assert [entry.cached for entry in again.manifest.passes] == [True] * len(FUSIONS) + [False]


@pytest.mark.parametrize("passes", [["fuse", "own:Rename"], ["own:Rename", "fuse"]], ids=["lowering", "next-pass"])
@pytest.mark.parametrize(
    "breakage", ["graph.outputs.clear()", "graph.inputs.clear()", "graph.extend(reversed(list(graph)))"]
)
def test_a_graph_that_nothing_checked_is_not_called_a_bug(make_recipe, cache_dir, tmp_path, passes, breakage):
    """With `verify: off`, what a user's pass broke is found by whatever comes next."""
    recipe = make_recipe(tmp_path / "r.yaml", passes=passes, verify="off")
    broken = OWN_PASS.replace('artifact.graph.graph[0].name = "first"', f"graph = artifact.graph.graph; {breakage}")
    (tmp_path / "own.py").write_text(broken)
    options = BuildOptions(output=tmp_path / "r.plan", cache_dir=cache_dir)
    with pytest.raises(LoweringError, match="nothing checked what rename_first left: set verify to shapes or numeric"):
        build_recipe(recipe, options)
    assert not options.output.exists()
    with pytest.raises(VerifyError, match="rename_first failed after"):
        build_recipe(make_recipe(tmp_path / "r.yaml", passes=passes), options)
