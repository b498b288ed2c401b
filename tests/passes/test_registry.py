import subprocess
import sys

import pytest

from optimc.errors import ConfigError, UnknownNameError
from optimc_passes.base import Pass, PassConfig
from optimc_passes.registry import PASSES, make_pass


def test_every_pass_states_what_the_pipeline_needs():
    assert {"rtn", "merge_qkv", "merge_gate_up"} <= set(PASSES)
    for name, pass_type in PASSES.items():
        assert issubclass(pass_type, Pass)
        assert pass_type.name == name
        assert pass_type.version >= 1
        assert pass_type.stage in ("weights", "graph", "heads")
        assert issubclass(pass_type.config_type, PassConfig)
        assert pass_type.__doc__


def test_every_option_is_described():
    for name, pass_type in PASSES.items():
        for option, field in pass_type.config_type.model_fields.items():
            assert field.description, f"{name}.{option}"


def test_options_as_yaml_gives_them_make_a_pass():
    made = make_pass("rtn", {"bits": 8, "symmetric": True, "ignore": ["lm_head", "*.down_proj"]})
    assert (made.config.bits, made.config.symmetric, made.config.group_size) == (8, True, 64)
    assert made.config.ignore == ("lm_head", "*.down_proj")
    assert make_pass("merge_qkv").config == PASSES["merge_qkv"].config_type()


def test_all_faults_of_one_pass_are_reported_with_their_places():
    with pytest.raises(ConfigError) as caught:
        make_pass("rtn", {"bits": 5, "grup": 64, "group_size": 0, "ignore": ["re:("], "only": []}, where="passes[2]")
    faults = {fault.where: fault.message for fault in caught.value.faults}
    assert set(faults) == {f"passes[2].{option}" for option in ("bits", "grup", "group_size", "ignore", "only")}
    assert faults["passes[2].bits"] == "input should be 2, 3, 4, 8 or 'auto', got 5"
    assert faults["passes[2].grup"] == "unknown key; known: bits, clip, group_size, ignore, only, ragged, symmetric"
    assert faults["passes[2].group_size"] == "must be positive, or -1 for the whole row"
    assert "'re:(' is not a regular expression" in faults["passes[2].ignore"]


def test_an_unknown_pass_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"passes\[0\]: unknown pass 'gptx'; known: .*merge_qkv.*rtn"):
        make_pass("gptx", where="passes[0]")
    with pytest.raises(UnknownNameError):
        PASSES["gptx"]


def test_importing_the_registry_loads_neither_torch_nor_transformers():
    code = "import sys, optimc_passes.registry; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
