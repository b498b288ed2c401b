import json

import pytest

from optimc.errors import CheckpointError, UnsupportedModelError
from optimc_passes.load.config import read_config


def read(folder, **options):
    return read_config(folder, **({"trust_remote_code": False} | options))


def test_the_config_is_the_one_transformers_reads(folder):
    from transformers import AutoConfig

    expected = AutoConfig.from_pretrained(folder).to_dict() | {"_name_or_path": ""}
    assert read(folder).config.to_dict() == expected


def test_missing_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        read(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "", "[" * 100_000], ids=["open", "list", "empty", "deep"])
def test_damaged_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|holds a list)"):
        read(folder)


def test_invalid_values_are_one_line(folder, tools):
    tools.edit_json(folder / "config.json", hidden_size="wide")
    with pytest.raises(CheckpointError, match="not a valid LlamaConfig: .*hidden_size") as caught:
        read(folder)
    assert "\n" not in str(caught.value)


def test_no_model_type(folder, tools):
    tools.edit_json(folder / "config.json", model_type=None)
    with pytest.raises(UnsupportedModelError, match="no model_type"):
        read(folder)


def test_model_type_without_a_causal_model(folder, tools):
    tools.edit_json(folder / "config.json", model_type="t5")
    with pytest.raises(UnsupportedModelError, match="'t5' has no causal language model"):
        read(folder)


def test_other_head_is_refused(folder, tools):
    tools.edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(UnsupportedModelError, match="LlamaForSequenceClassification, not of a causal"):
        read(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "hqq"])
def test_quantized_checkpoint_is_refused_by_method(folder, tools, method):
    tools.edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UnsupportedModelError, match=rf"quantized already \({method}\), which cannot be read; readable"):
        read(folder)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_readable_methods_are_described_apart_from_the_configuration(folder, tools, method):
    facts = {"quant_method": method, "bits": 4, "group_size": 128}
    tools.edit_json(folder / "config.json", quantization_config=facts)
    loaded = read(folder)
    assert loaded.quantization.method == method
    assert "quantization_config" not in loaded.raw
    assert not hasattr(loaded.config, "quantization_config")


OWN_CODE = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


def write_own_code(folder, body: str = "") -> None:
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"{body}\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n"
        "    config_class = OwnConfig\n"
    )


def test_own_code_of_a_known_family_is_not_run(folder, tools):
    tools.edit_json(folder / "config.json", auto_map=OWN_CODE)
    write_own_code(folder, "raise RuntimeError('was run')")
    loaded = read(folder)
    assert loaded.model_class.__name__ == "LlamaForCausalLM"
    assert not hasattr(loaded.config, "auto_map")
    assert "own code was not run" in loaded.notes[0]


def test_own_code_of_an_unknown_family_is_refused_in_words(folder, tools):
    tools.edit_json(folder / "config.json", auto_map=OWN_CODE, model_type="own_llama")
    write_own_code(folder, "raise RuntimeError('was run')")
    with pytest.raises(UnsupportedModelError, match="exports transformers' classes only"):
        read(folder)


def test_trusted_own_code_is_run(folder, tools, load, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tools.edit_json(folder / "config.json", auto_map=OWN_CODE, model_type="own_llama")
    write_own_code(folder)
    checkpoint = load(folder, trust_remote_code=True)
    assert type(checkpoint.config).__name__ == "OwnConfig"
    assert "model.layers.2.mlp.up_proj.weight" in checkpoint.weights
    before = checkpoint.digest
    write_own_code(folder, "# changed")
    assert load(folder, trust_remote_code=True).digest != before


def test_trusted_code_that_fails_is_one_line(folder, tools, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    tools.edit_json(folder / "config.json", auto_map=OWN_CODE, model_type="own_llama")
    write_own_code(folder, "raise RuntimeError('first\\nsecond')")
    with pytest.raises(CheckpointError, match="own code failed: first second"):
        read(folder, trust_remote_code=True)


def test_raw_keeps_what_the_file_says(folder, tools):
    tools.edit_json(folder / "config.json", eos_token_id=None)
    loaded = read(folder)
    assert "eos_token_id" not in loaded.raw
    assert loaded.raw == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_refused(folder, names):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": names}))
    with pytest.raises(CheckpointError, match="architectures must be a list of class names"):
        read(folder)
