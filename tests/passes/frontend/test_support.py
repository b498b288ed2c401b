import subprocess
import sys
import time

import pytest
import transformers

from optimc.errors import UnsupportedModelError
from optimc_passes.frontend import TESTED, check_supported

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def _config(name: str, **options):
    return getattr(transformers, f"{name}Config")(**options)


@pytest.mark.parametrize("model_type", sorted(TESTED))
def test_accepts_the_defaults_of_every_tested_architecture(model_type):
    check_supported(transformers.CONFIG_MAPPING[model_type](), max_seq_len=2048)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (_config("Mixtral"), r"mixture-of-experts layers \(num_experts = 8\)"),
        (_config("Qwen2Moe"), "mixture-of-experts layers"),
        (_config("GptOss"), "mixture-of-experts layers"),
        (_config("T5"), r"an encoder beside the decoder \(is_encoder_decoder\)"),
        (_config("Mamba"), "recurrent layers"),
        (_config("Jamba"), "layers of type linear_attention"),
        (_config("FalconH1"), "layers of type hybrid"),
        (_config("RecurrentGemma"), "recurrent layers"),
        (_config("Llama4Text"), r"chunked attention \(attention_chunk_size = 8192\)"),
        (_config("DeepseekV3"), "latent attention"),
        (_config("Gemma3"), "image or audio input"),
        (_config("Falcon", alibi=True), "ALiBi position biases"),
        (_config("Gemma3Text", use_bidirectional_attention=True), "attention that is not causal"),
        (_config("Llama", architectures=["LlamaForSequenceClassification"]), "is not a causal language model"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_refuses_at_once_naming_what_is_missing(config, missing):
    start = time.perf_counter()
    with pytest.raises(UnsupportedModelError, match=missing):
        check_supported(config)
    assert time.perf_counter() - start < 1


def test_reports_everything_that_is_missing_in_one_line():
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(_config("Jamba"))
    message = str(caught.value)
    assert "mixture-of-experts" in message
    assert "recurrent" in message
    assert "\n" not in message


def test_refuses_an_untested_architecture_by_name_and_lists_the_tested():
    config = _config("Cohere", architectures=["CohereForCausalLM"])
    with pytest.raises(UnsupportedModelError) as caught:
        check_supported(config)
    message = str(caught.value)
    assert message.startswith("CohereForCausalLM: it is not a tested architecture")
    assert all(name in message for name in TESTED.values())


def test_untested_architectures_must_still_go_through_the_attention_interface():
    check_supported(_config("Cohere"), allow_untested=True)
    with pytest.raises(UnsupportedModelError, match="does not go through the attention interface"):
        check_supported(_config("Mpt"), allow_untested=True)
    with pytest.raises(UnsupportedModelError, match="no causal language model"):
        check_supported(_config("ViT"), allow_untested=True)


def test_refuses_rope_that_depends_on_the_running_length():
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        check_supported(_config("Llama", rope_parameters=dynamic))


def test_refuses_an_untested_rope_type_in_any_layer_type():
    config = _config("Gemma3Text")
    config.rope_parameters["full_attention"]["rope_type"] = "proportional"
    with pytest.raises(UnsupportedModelError, match="type 'proportional'; tested are default, linear"):
        check_supported(config)


def test_accepts_yarn():
    check_supported(_config("Llama", rope_parameters=YARN))


def test_longrope_is_accepted_only_where_the_short_factors_always_apply():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    config = _config(
        "Phi3", rope_parameters=rope, original_max_position_embeddings=4096, max_position_embeddings=131072
    )
    check_supported(config, max_seq_len=4096)
    with pytest.raises(UnsupportedModelError, match="max_seq_len is 4097, set it to at most 4096"):
        check_supported(config, max_seq_len=4097)


def test_importing_the_frontend_imports_neither_torch_nor_transformers():
    code = "import sys, optimc_passes.frontend; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
