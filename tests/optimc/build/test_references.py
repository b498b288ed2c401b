"""What a recipe refers to, checked beside the recipe itself."""

from pathlib import Path

import pytest
import yaml

from optimc.build.pass_catalog import PassCatalog
from optimc.build.references import check_references


def findings(tmp_path, **data):
    data = {"model": "organisation/name", "passes": [], "calibration": {}, **data}
    return dict(check_references(data, tmp_path / "recipe.yaml", PassCatalog(tmp_path)))


def test_a_sound_recipe_has_no_findings(tmp_path):
    assert findings(tmp_path) == {}
    assert findings(tmp_path, target={"backend": "onnxruntime", "int8_activations": True, "kv_dtype": "float32"}) == {}


def test_each_option_the_target_refuses_is_found_at_its_key(tmp_path):
    found = findings(tmp_path, target={"backend": "onnxruntime", "kv_dtype": "int8", "activation_scales": "row"})
    assert sorted(found) == [("target", "activation_scales"), ("target", "kv_dtype")]
    assert "float32 only, not int8" in found["target", "kv_dtype"]


def test_limits_that_are_wrong_themselves_hide_no_refused_option(tmp_path):
    target = {"backend": "onnxruntime", "kv_dtype": "int4"}
    for limits in ({"max_seqs": 0}, 3, None):
        assert list(findings(tmp_path, target=target, limits=limits)) == [("target", "kv_dtype")]


def test_parts_of_a_wrong_shape_are_left_to_the_recipe_to_report(tmp_path):
    for target in ("onnxruntime", {"backend": "onnxruntime", "kv_dtype": "int3"}, {"backend": 3}):
        assert findings(tmp_path, target=target) == {}


def test_smoothquant_finds_a_target_that_rounds_activations_otherwise(tmp_path):
    place = ("passes", 0, "smoothquant", "activations")
    token = [{"smoothquant": {"activations": "token"}}]
    static = [{"smoothquant": {"activations": "static"}}]
    assert "activation_scales: row" in findings(tmp_path, passes=token)[place]
    assert "activation_scales: row" in findings(tmp_path, passes=["smoothquant"])[place]
    assert findings(tmp_path, passes=token, target={"activation_scales": "row"}) == {}
    assert "use activations: static" in findings(tmp_path, passes=token, target={"backend": "onnxruntime"})[place]
    assert findings(tmp_path, passes=static) == {}
    assert findings(tmp_path, passes=static, target={"backend": "onnxruntime"}) == {}
    assert "forbids it" in findings(tmp_path, passes=static, target={"int8_activations": False})[place]


def test_an_entry_that_comes_too_late_is_found_once(tmp_path):
    found = list(
        check_references(
            {"model": "organisation/name", "passes": ["medusa", "fuse", "rtn"], "calibration": {}},
            tmp_path / "recipe.yaml",
            PassCatalog(tmp_path),
        )
    )
    assert [place for place, _ in found] == [("passes", 1), ("passes", 2)], "fuse stands for many passes"
    assert all(message.endswith("must come before medusa") for _, message in found)


def test_more_heads_than_a_step_has_rows_are_found_before_they_are_trained(tmp_path):
    place = ("passes", 0, "medusa", "heads")
    small = {"max_step_tokens": 2}
    assert "3 heads are evaluated in one step" in findings(tmp_path, passes=["medusa"], limits=small)[place]
    assert findings(tmp_path, passes=["medusa"]) == {}
    assert findings(tmp_path, passes=[{"medusa": {"heads": 2}}], limits=small) == {}
    assert findings(tmp_path, passes=["medusa"], limits=small, target={"backend": "onnxruntime"}) == {}
    assert findings(tmp_path, passes=[{"medusa": {"from": "somewhere"}}], limits=small) == {}, "the file counts"


def test_a_cache_format_is_asked_for_in_one_place_and_one_the_target_has(tmp_path):
    passes = [{"kv_quant": {"dtype": "int8"}}]
    assert findings(tmp_path, passes=passes) == {}
    assert ("target", "kv_dtype") in findings(tmp_path, passes=passes, target={"kv_dtype": "int4"})
    found = findings(tmp_path, passes=passes, target={"backend": "onnxruntime"})
    assert [key[:2] for key in found] == [("passes", 0)]


def test_keys_are_measured_on_the_weights_that_are_served(tmp_path):
    """Scales of tokens are computed as keys are written, whatever weights made them."""
    rtn, auto_bits = {"rtn": {"bits": 4}}, {"auto_bits": {"average_bits": 4}}
    found = findings(tmp_path, passes=["kv_quant", auto_bits, rtn, "fuse"])
    assert list(found) == [("passes", 0)]
    assert "kv_quant measures keys, and rtn behind it changes the weights" in found["passes", 0]
    assert findings(tmp_path, passes=[rtn, "kv_quant", "fuse"]) == {}
    for unmeasured in ({"keys": "token"}, {"allow_uncalibrated": True}):
        assert findings(tmp_path, passes=[{"kv_quant": unmeasured}, rtn]) == {}


def test_what_measures_has_text_to_measure_on(tmp_path):
    passes = ["rtn", {"gptq": {}}, {"kv_quant": {}}]
    found = findings(tmp_path, passes=passes, calibration=None)
    assert list(found) == [("passes", 2), ("passes", 1)]
    assert found["passes", 1] == "gptq needs calibration text; add a calibration section to the recipe"
    assert "keys: token, or allow_uncalibrated: true" in found["passes", 2]
    assert findings(tmp_path, passes=["rtn", {"kv_quant": {"keys": "token"}}], calibration=None) == {}
    assert findings(tmp_path, passes=passes) == {}


def test_formats_of_the_cache_are_chosen_once_and_before_they_are_used(tmp_path):
    chosen = {"auto_bits": {"average_bits": 4, "kv": {"dtypes": ["int8", "int4"]}}}
    taken, given = {"kv_quant": {"dtype": "auto"}}, {"kv_quant": {"dtype": "int8", "keys": "token"}}
    dtype = ("passes", 1, "kv_quant", "dtype")
    assert findings(tmp_path, passes=[chosen, taken]) == {}
    assert "passes[0] auto_bits chooses formats of the cache" in findings(tmp_path, passes=[chosen, given])[dtype]
    assert "no pass before this one" in findings(tmp_path, passes=["rtn", taken])[dtype]
    assert "no pass before this one" in findings(tmp_path, passes=[{"auto_bits": {"average_bits": 4}}, taken])[dtype]
    assert "put it before kv_quant" in findings(tmp_path, passes=[given, chosen])["passes", 1]
    assert ("target", "kv_dtype") in findings(tmp_path, passes=[chosen], target={"kv_dtype": "bfloat16"})
    found = findings(tmp_path, passes=[chosen], target={"backend": "onnxruntime"})
    assert "float32" in found["passes", 0, "auto_bits", "kv", "dtypes"]
    (tmp_path / "mine.py").write_text("")
    assert dtype not in findings(tmp_path, passes=["mine:Chooses", taken])


RTX = {"backend": "tensorrt", "flavor": "rtx"}


def test_a_sound_recipe_for_tensorrt_has_no_findings(tmp_path):
    assert findings(tmp_path, target={"backend": "tensorrt"}) == {}
    assert findings(tmp_path, target={"backend": "tensorrt", "builder_level": 5, "kv_dtype": "float16"}) == {}
    asked = {"precision": "bfloat16", "kv_dtype": "bfloat16", "gpu": ["sm_89", "sm_120"], "int8_activations": False}
    assert findings(tmp_path, target=RTX | asked) == {}
    passes = [{"smoothquant": {"activations": "static"}}, {"kv_quant": {"dtype": "int8", "keys": "token"}}]
    assert findings(tmp_path, target=RTX, passes=passes) == {}


def test_what_only_tensorrt_has_is_refused_key_by_key_elsewhere(tmp_path):
    asked = {"flavor": "rtx", "precision": "float16", "gpu": ["sm_89"], "builder_level": 3}
    for backend in ("cpu", "onnxruntime"):
        found = findings(tmp_path, target={"backend": backend} | asked)
        assert sorted(found) == sorted(("target", key) for key in asked)
        assert found["target", "flavor"] == f"is for target tensorrt; the {backend} target has nothing of the kind"


@pytest.mark.parametrize(
    ("asked", "key", "reason"),
    [
        ({"kv_dtype": "float32"}, "kv_dtype", "no pool of float32 with precision float16; use one of float16, int8"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype", "no pool of bfloat16 with precision float16"),
        ({"kv_dtype": "int4"}, "kv_dtype", "no pool of int4"),
        ({"kv_dtype": "fp8"}, "kv_dtype", "fp8 needs an attention plugin"),
        (
            {"int8_activations": True},
            "int8_activations",
            "no scale per group of 8-bit activations",
        ),
        ({"gpu": ["sm_90", "sm_89"]}, "gpu", "TensorRT-RTX does not build our graphs for sm_90; it does for sm_80, "),
        ({"gpu": []}, "gpu", "no GPU at all"),
        ({"gpu": ["sm_89", "sm_80", "sm_89"]}, "gpu", "sm_89 is named more than once; name each GPU once"),
        (
            {"flavor": "tensorrt", "gpu": ["sm_90"]},
            "gpu",
            "builds for the GPU it runs on; leave gpu out",
        ),
        ({"builder_level": 3}, "builder_level", "this is for flavor: tensorrt"),
    ],
)
def test_what_the_tensorrt_target_has_not_is_said_at_its_key(tmp_path, asked, key, reason):
    found = findings(tmp_path, target=RTX | asked)
    assert list(found) == [("target", key)]
    assert reason in found["target", key]


def test_caches_the_tensorrt_target_cannot_hold_are_found_at_the_pass_that_asks(tmp_path):
    def found(**options):
        return findings(tmp_path, target=RTX, passes=[{"kv_quant": options}])

    assert "set keys: token" in found(dtype="int8")["passes", 0, "kv_quant", "keys"], "auto may come to channels"
    assert "set keys: token" in found(dtype="int8", keys="channel")["passes", 0, "kv_quant", "keys"]
    assert "use one of float16, int8" in found(dtype="int4", keys="token")["passes", 0, "kv_quant", "dtype"]
    assert "fp8 needs an attention plugin" in found(dtype="fp8")["passes", 0, "kv_quant", "dtype"]
    mixed = {"dtype": "int8", "keys": "token", "skip_layers": [0]}
    assert "bfloat16" in found(**mixed)["passes", 0, "kv_quant", "float_dtype"]
    half = RTX | {"precision": "bfloat16"}
    assert findings(tmp_path, target=half, passes=[{"kv_quant": mixed}]) == {}


def test_smoothquant_on_tensorrt_says_whose_scale_it_means(tmp_path):
    place = ("passes", 0, "smoothquant", "activations")
    rows = RTX | {"activation_scales": "row"}
    assert "activation_scales: row" in findings(tmp_path, target=RTX, passes=["smoothquant"])[place]
    assert findings(tmp_path, target=rows, passes=["smoothquant"]) == {}
    assert findings(tmp_path, target=rows | {"int8_activations": True}, passes=["smoothquant"]) == {}
    static = [{"smoothquant": {"activations": "static"}}]
    assert "forbids it" in findings(tmp_path, target=RTX | {"int8_activations": False}, passes=static)[place]


@pytest.mark.parametrize("path", sorted(Path("recipes/tensorrt").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_for_tensorrt_have_no_findings(path):
    """Their models are on the hub and nothing is built of them here; what they refer to is checked all the same."""
    assert dict(check_references(yaml.safe_load(path.read_text()), path, PassCatalog(path.parent))) == {}
