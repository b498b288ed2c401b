"""Keys are not like values: a bias of 50 on two channels of k_proj, as some models have at their ends.

After RoPE the biased channel and the other of its pair are large for every token. Scales of channels hold them apart
from the rest; one scale for all channels leaves the rest a handful of steps, and predictions follow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from optimc.plan import Plan, PlanTensor, write_plan
from optimc_passes.calibrate import evaluation_windows
from optimc_runtime.engine import Engine

pytestmark = pytest.mark.slow

LENGTHS = (16, 128, 500)
WINDOWS = 4
BIASED = (3, 22)
"""A channel of each head."""
CALIBRATION = {"samples": 64, "seq_len": 256}
"""Shorter than what is served: RoPE turns a biased pair on and on, and scales must hold what becomes of it."""
LIMITS = {"max_seq_len": 512, "max_step_tokens": 64, "max_seqs": 2, "kv_memory": "4MiB"}


@pytest.fixture(scope="module")
def biased_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with biases in attention; those of k are 50 on two channels of every layer."""
    folder = tmp_path_factory.mktemp("biased")
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_folder)
    config.attention_bias = True
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, (8.0 if name == "lm_head.weight" else 1.2) / parameter.shape[1] ** 0.5)
            if name.endswith("k_proj.bias"):
                parameter[list(BIASED)] = 50.0
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((tiny_folder / file).read_bytes())
    return folder


@pytest.fixture(scope="module")
def plans(build, biased_folder, tmp_path_factory) -> dict[str, Path]:
    def make(name, *passes):
        given = {"model": str(biased_folder), "limits": LIMITS, "calibration": CALIBRATION}
        return build(f"biased-{name}", passes=[*passes, "fuse"], **given).path

    made = {"float32": make("float32")}
    for dtype in ("int8", "int4"):
        made[dtype] = make(dtype, {"kv_quant": {"dtype": dtype, "keys": "channel"}})
        made[f"{dtype} auto"] = make(f"{dtype}-auto", {"kv_quant": {"dtype": dtype}})
    made["int8 one scale"] = tmp_path_factory.mktemp("one") / "one.plan"
    with Plan.open(made["int8"]) as plan:

        def one_scale(name):
            array = plan.tensor(name)
            return np.full_like(array, array.max()) if name.endswith("key_scales") else array

        tensors = [
            PlanTensor(spec.name, spec.dtype, spec.shape, lambda name=spec.name: one_scale(name)) for spec in plan
        ]
        write_plan(made["int8 one scale"], plan.manifest.model_copy(update={"tensors": {}}), tensors)
    return made


@pytest.fixture(scope="module")
def log_probabilities(plans, tiny_folder) -> dict[str, np.ndarray]:
    """Of three plans, [windows, 500, V]: what is said after each token of texts that calibration did not see."""
    tokenizer = (tiny_folder / "tokenizer.json").read_bytes()
    texts = evaluation_windows(tokenizer, windows=WINDOWS, length=max(LENGTHS))
    said = {}
    for name in ("float32", "int8", "int8 one scale"):
        with Engine.load(plans[name]) as engine:
            logits = np.stack([engine.score(text.tolist()) for text in texts]).astype(np.float64)
        said[name] = logits - np.logaddexp.reduce(logits, axis=-1)[..., None]
    return said


def kl(said: dict[str, np.ndarray], name: str, length: int) -> float:
    """Mean divergence from the float32 cache over the first `length` tokens, in nats per token."""
    p, q = said["float32"][:, :length], said[name][:, :length]
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("length", LENGTHS)
def test_channel_scales_beat_one_scale_for_all_fivefold(log_probabilities, length):
    one, channel = kl(log_probabilities, "int8 one scale", length), kl(log_probabilities, "int8", length)
    assert one > 0.01, "without a visible loss nothing is shown"
    assert one > 5 * channel


def test_auto_takes_scales_of_channels_for_such_keys(plans):
    for dtype in ("int8", "int4"):
        with Plan.open(plans[f"{dtype} auto"]) as plan:
            assert [layer.keys for layer in plan.manifest.kv.layers] == ["channel"] * 3
            note = plan.manifest.passes[0].layers[0].note
            assert "per token" in note
            assert "per channel" in note
