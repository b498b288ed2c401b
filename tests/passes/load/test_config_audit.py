import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from optimc.errors import UnsupportedModelError
from optimc_passes.load.config_audit import audit_config, is_neutral

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite"]


def audit(family: str, raw: dict[str, object]) -> None:
    config_class = CONFIG_MAPPING[family]
    audit_config(raw, config_class, MODEL_FOR_CAUSAL_LM_MAPPING[config_class], "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_writes_is_understood(family):
    audit(family, CONFIG_MAPPING[family]().to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unknown_key_is_refused_by_name_and_value(family):
    with pytest.raises(UnsupportedModelError, match=r"Config does not read foo_attention_scale \(2\)"):
        audit(family, {"foo_attention_scale": 2})


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5, "torch_dtype": "bfloat16"}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
        ("llama", {"temperature": 0.6, "max_length": 4096, "do_sample": True}),
        ("qwen2", {"head_dim": 128, "use_mrope": False}),
        ("gemma3_text", {"sliding_window_pattern": 6, "rope_local_base_freq": 1e4, "cache_implementation": "hybrid"}),
        ("phi3", {"partial_rotary_factor": 0.75, "embd_pdrop": 0.0, "resid_pdrop": 0.1, "attention_bias": False}),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None}},
        ),
    ],
)
def test_spellings_seen_in_published_checkpoints_are_understood(family, raw):
    audit(family, raw)


@pytest.mark.parametrize(
    ("family", "raw", "named"),
    [
        ("llama", {"rope_interleaved": True}, r"rope_interleaved \(True\)"),
        ("qwen2", {"attention_bias": True}, r"attention_bias \(True\)"),
        ("llama", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping \(50\.0\)"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "wobble": 3}}, r"rope_scaling\.wobble"),
        ("llama", {"rope_parameters": {"rope_type": "mrope", "mrope_section": [1]}}, r"rope_parameters\.mrope_section"),
    ],
)
def test_keys_another_family_reads_are_refused(family, raw, named):
    with pytest.raises(UnsupportedModelError, match=named):
        audit(family, raw)


def test_all_unread_keys_are_named_at_once():
    with pytest.raises(UnsupportedModelError, match=r"bar \(1\), foo \('x'\)"):
        audit("llama", {"foo": "x", "bar": 1})


def test_long_values_are_shortened():
    with pytest.raises(UnsupportedModelError) as caught:
        audit("llama", {"foo": list(range(100))})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_values_that_ask_for_nothing_are_neutral(value):
    assert is_neutral(value)
    audit("llama", {"foo_attention_scale": value})


@pytest.mark.parametrize("value", [0, 0.0, True, 1, "x", [0]])
def test_values_that_ask_for_something_are_not_neutral(value):
    assert not is_neutral(value)
