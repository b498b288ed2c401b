import subprocess
import sys

import pytest
import torch
import transformers

from optimc_passes.frontend.attention import paged_attention_registered
from optimc_passes.frontend.skeleton import build_skeleton

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def build():
    with paged_attention_registered():
        yield build_skeleton


def test_parameters_have_their_shapes_and_one_scalar_of_memory(build):
    model = build(transformers.LlamaConfig(**SIZES))
    real = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES))
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert all(p.untyped_storage().nbytes() == 4 for p in model.parameters())


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text"])
def test_buffers_hold_their_real_values(build, name):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    real = dict(transformers.AutoModelForCausalLM.from_config(config).named_buffers())
    skeleton = dict(build(config).named_buffers())
    assert skeleton.keys() == real.keys()
    assert len(real) > 0
    assert all(torch.equal(skeleton[buffer], real[buffer]) for buffer in real)


def test_tied_parameters_stay_one_object(build):
    tied = build(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = build(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_model_is_float32_and_in_evaluation_mode_whatever_the_config_says(build):
    model = build(transformers.LlamaConfig(**SIZES, dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(module.training for module in model.modules())


def test_config_is_not_changed(build):
    config = transformers.LlamaConfig(**SIZES, dtype="bfloat16", pad_token_id=5)
    before = config.to_dict()
    build(config)
    assert config.to_dict() == before


def test_padding_tokens_beyond_the_vocabulary_do_not_matter(build):
    assert build(transformers.LlamaConfig(**SIZES, pad_token_id=128_004)) is not None


def test_other_models_are_built_normally_afterwards(build):
    build(transformers.LlamaConfig(**SIZES))
    assert not torch.nn.Linear(3, 3).weight.is_meta


def test_a_model_far_larger_than_memory_costs_next_to_none():
    # One layer of a 405B model: over 5 billion parameters. A fresh process, so that the peak is this build's own.
    code = """
import resource, transformers
from optimc_passes.frontend.attention import paged_attention_registered
from optimc_passes.frontend.skeleton import build_skeleton
config = transformers.LlamaConfig(
    hidden_size=16384, intermediate_size=53248, num_hidden_layers=1, num_attention_heads=128,
    num_key_value_heads=8, vocab_size=65536)
with paged_attention_registered():
    build_skeleton(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = build_skeleton(config)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
parameters = sum(p.numel() for p in model.parameters())
assert parameters * 4 > 8e9, parameters
print((after - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "megabytes"
