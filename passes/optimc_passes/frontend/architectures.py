"""The architectures optimc supports. Supported means tested: tests/e2e/test_architectures.py compares each.

Adding one: a line here, a tiny configuration in that test and in tests/passes/frontend.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TESTED: Mapping[str, str] = MappingProxyType(
    {
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "granite": "GraniteForCausalLM",
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
)
"""transformers model type to the class that is exported."""

TESTED_ROPE = frozenset({"default", "linear", "llama3", "longrope", "yarn"})
"""RoPE types whose frequencies are fixed when the model is built (longrope: as long as its short factors apply)."""

TESTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types with one PagedAttention each."""
