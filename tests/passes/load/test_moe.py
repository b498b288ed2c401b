"""A mixture of experts is refused by its configuration: before a weight is looked at, in no time."""

import json
import time
from pathlib import Path

import pytest
import transformers

from optimc.errors import UnsupportedModelError
from optimc_passes.frontend import check_supported
from optimc_passes.load import load_checkpoint


def test_experts_are_refused_in_under_a_second(tmp_path: Path):
    config = transformers.MixtralConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_local_experts=4)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["MixtralForCausalLM"]}))
    # Nothing that could be read as weights: who looks fails with another error.
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    start = time.process_time()
    with pytest.raises(UnsupportedModelError, match=r"mixture-of-experts layers \(num_.*experts = 4\)"):
        load_checkpoint(tmp_path, cache_dir=tmp_path / "cache", check_config=check_supported)
    assert time.process_time() - start < 1
