"""What users get wrong: each is one clear message on standard error, exit code 2, and no traceback."""

import json
import shutil

import pytest

from optimc.plan import Plan


@pytest.fixture
def refused(cli):
    def refused(*arguments, env=None):
        """Run, check how it was refused, return the message."""
        result = cli(*arguments, env=env)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert result.stdout == ""
        return result.stderr

    return refused


def one_line(message):
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    return message


def test_a_recipe_with_three_faults_reports_all_three(refused, make_recipe, tmp_path):
    recipe = make_recipe(
        tmp_path / "r.yaml", passes=[{"rtn": {"bits": 5}}], limits={"max_seqs": 0}, colour="blue", verify="numeric"
    )
    message = refused("build", recipe)
    assert "3 faults" in message
    assert "passes[0].rtn.bits" in message
    assert "limits.max_seqs" in message
    assert "colour: unknown key" in message
    assert message.count("line ") == 3


def test_faults_in_what_a_recipe_refers_to_are_reported_with_the_others(refused, make_recipe, tmp_path):
    recipe = make_recipe(
        tmp_path / "r.yaml",
        model="absent/really/deep",
        target={"backend": "abacus"},
        passes=["merge_qkv", "rtn", {"merge_gate_up": {"colour": "blue"}}],
    )
    message = refused("build", recipe)
    assert "4 faults" in message
    assert "target.backend: unknown target 'abacus'" in message
    assert "model: 'absent/really/deep' is neither" in message
    assert "passes[1]: rtn changes weights and must come before merge_qkv" in message
    assert "passes[2].merge_gate_up.colour: unknown key" in message
    assert message.count("line ") == 4


def test_options_the_target_refuses_are_reported_with_the_others(refused, make_recipe, tmp_path):
    target = {"backend": "onnxruntime", "kv_dtype": "int8", "activation_scales": "row"}
    message = refused("build", make_recipe(tmp_path / "r.yaml", target=target, passes=[{"rtn": {"bits": 5}}]))
    assert "3 faults" in message
    assert "target.kv_dtype: the onnxruntime target keeps keys and values in float32 only, not int8" in message
    assert "target.activation_scales: the onnxruntime target has no scales per row" in message
    assert message.count("line ") == 3


def test_compare_looks_at_every_plan_before_it_builds_a_recipe(refused, make_recipe, tmp_path):
    recipe, absent = make_recipe(tmp_path / "r.yaml"), tmp_path / "absent.plan"
    message = refused("compare", recipe, absent, "--output-dir", tmp_path)
    assert str(absent) in message
    assert not (tmp_path / "r.plan").exists()


def test_a_missing_shard_is_named(refused, make_recipe, tiny_model, tmp_path):
    folder = tmp_path / "sharded"
    tiny_model.save_pretrained(folder, max_shard_size="300KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    message = one_line(refused("build", make_recipe(tmp_path / "r.yaml", model=str(folder))))
    assert shards[0].name in message


def test_a_group_size_that_does_not_divide_names_the_layers(refused, make_recipe, tmp_path):
    message = refused("build", make_recipe(tmp_path / "r.yaml", passes=[{"rtn": {"group_size": 48}}]))
    assert "model.layers.0.self_attn.q_proj" in message
    assert "64" in message
    assert "48" in message


def test_an_unsupported_architecture_is_refused_by_name(refused, make_recipe, tiny_folder, tmp_path):
    folder = tmp_path / "mixtral"
    folder.mkdir()
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    message = one_line(refused("build", make_recipe(tmp_path / "r.yaml", model=str(folder))))
    assert "ixtral" in message


def test_a_truncated_plan_is_refused(refused, fp32_plan, tmp_path):
    path = tmp_path / "short.plan"
    path.write_bytes(fp32_plan.read_bytes()[:-1000])
    for command in ("inspect", "serve", "chat", "bench", "eval"):
        assert "truncated" in one_line(refused(command, path))


def test_a_plan_of_another_format_version_is_refused(refused, fp32_plan, tmp_path):
    path = tmp_path / "old.plan"
    data = fp32_plan.read_bytes()
    path.write_bytes(data.replace(b'"optimc.format_version":"1"', b'"optimc.format_version":"7"', 1))
    assert "plan format 7" in one_line(refused("inspect", path))


def test_a_plan_for_another_backend_is_refused(refused, fp32_plan, tmp_path):
    path = tmp_path / "other.plan"
    with Plan.open(fp32_plan) as plan:
        backend = plan.manifest.target.backend
    absent = backend.upper()  # of the same length, so that the rest of the file stays where it is
    data = fp32_plan.read_bytes()
    path.write_bytes(data.replace(rf"\"backend\":\"{backend}\"".encode(), rf"\"backend\":\"{absent}\"".encode(), 1))
    assert f"built for '{absent}'" in one_line(refused("serve", path))


def test_a_damaged_weight_is_found_before_serving(refused, fp32_plan, tmp_path):
    path = tmp_path / "damaged.plan"
    data = bytearray(fp32_plan.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "SHA-256" in one_line(refused("serve", path))
    assert "SHA-256" in one_line(refused("inspect", path, "--verify"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["build", "absent.yaml"], "absent.yaml"),
        (["inspect", "absent.plan"], "absent.plan"),
        (["bench"], "either a PLAN or --url"),
        (["bench", "--url", "http://127.0.0.1:9", "--requests", "0"], "requests"),
        (["compare", "absent.plan", "--concurrency", "x"], "--concurrency"),
    ],
)
def test_other_mistakes_are_said_in_words(refused, arguments, expected):
    assert expected in refused(*arguments)


def test_options_beyond_the_plans_limits_are_refused_at_start(refused, fp32_plan):
    assert "max_seqs" in refused("serve", fp32_plan, "--max-seqs", 17)
    assert "kv" in refused("serve", fp32_plan, "--kv-memory", "1KiB").lower()
    assert "12 parsecs" in refused("serve", fp32_plan, "--kv-memory", "12 parsecs")


def test_an_output_that_cannot_be_written_is_said_in_words(refused, make_recipe, tmp_path):
    assert "is a folder" in refused("build", make_recipe(tmp_path / "r.yaml"), "-o", tmp_path)


def test_internal_faults_show_no_traceback_unless_asked(cli, make_recipe, tmp_path):
    recipe = make_recipe(tmp_path / "r.yaml", passes=[{"rtn": {"bits": 5}}])
    quiet, loud = cli("build", recipe), cli("build", recipe, "--debug")
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in loud.stderr
    assert quiet.returncode == loud.returncode == 2


def test_a_model_that_is_nowhere_is_said_in_words(refused, make_recipe, tmp_path):
    message = refused("build", make_recipe(tmp_path / "r.yaml", model="absent/really/deep"))
    assert "neither a folder nor a .gguf file nor a hub id" in message
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    message = refused("build", make_recipe(tmp_path / "r.yaml", model="nobody/nothing"), env=offline)
    assert "nobody/nothing" in message


def test_a_checkpoint_with_a_surplus_tensor_is_refused(refused, make_recipe, tiny_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "surplus"
    shutil.copytree(tiny_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.9.stray.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = one_line(refused("build", make_recipe(tmp_path / "r.yaml", model=str(folder))))
    assert "model.layers.9.stray.weight" in message


def test_a_plan_never_replaces_what_is_no_plan(refused, make_recipe, tiny_folder, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_folder, folder)
    recipe = make_recipe(tmp_path / "r.yaml", model=str(folder))
    for path in (recipe, folder / "model.safetensors", folder / "config.json"):
        before = path.read_bytes()
        assert "exists and is not an engine.plan" in refused("build", recipe, "-o", path)
        assert path.read_bytes() == before


def test_places_that_cannot_be_written_are_all_said_before_any_work(refused, make_recipe, tmp_path):
    recipe, file = make_recipe(tmp_path / "r.yaml"), tmp_path / "file"
    file.write_text("")
    message = refused("build", recipe, "-o", file / "x.plan", "--dump-graph", file, "--cache-dir", file / "cache")
    assert "3 faults" in message
    assert message.count(f"{file} is not a folder") == 3
    assert "File name too long" in refused("build", recipe, "-o", tmp_path / ("x" * 300))


def test_a_model_name_that_can_be_no_path_is_said_in_words(refused, make_recipe, tmp_path):
    for name in ("x" * 5000, "~nobody-of-that-name/model/folder"):
        assert "is neither a folder nor" in refused("build", make_recipe(tmp_path / "r.yaml", model=name))


def test_options_of_passes_are_not_guessed_about(refused, make_recipe, tmp_path):
    options = {"symmetric": "yes", "group_size": "16"}
    assert "2 faults" in refused("build", make_recipe(tmp_path / "r.yaml", passes=[{"rtn": options}]))


def test_an_untested_architecture_is_tried_only_if_asked(refused, make_recipe, tmp_path):
    config = {"model_type": "starcoder2", "hidden_size": 64, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "allow_untested: true" in refused("build", make_recipe(tmp_path / "r.yaml", model=str(tmp_path)))
    model = {"source": str(tmp_path), "allow_untested": True}
    assert "no weights" in refused("build", make_recipe(tmp_path / "r.yaml", model=model))
