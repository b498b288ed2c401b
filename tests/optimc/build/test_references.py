"""What a recipe refers to, checked beside the recipe itself."""

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
