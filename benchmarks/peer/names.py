"""What engines, metrics and sections are called in results."""

from __future__ import annotations

from collections.abc import Mapping

OPTIMC, OPTIMC_SERVE, OPTIMC_BF16 = "optimc", "optimc serve", "optimc, bf16 pool"
LLAMA, LLAMA_SERVER = "llama.cpp", "llama-server"
OPENVINO, ORT_GENAI = "OpenVINO", "onnxruntime-genai"

DECODE, PREFILL = "SmolLM2 decode, context 32–128", "SmolLM2 prefill, 512 tokens"
LARGE_DECODE, LARGE_PREFILL = "587M decode, context 32–128", "587M prefill, 512 tokens"
CONCURRENT = "SmolLM2, 16 requests of 128 + 128 tokens"
CONTEXT_SHORT, CONTEXT_LONG = "SmolLM2 decode, context 48–80", "SmolLM2 decode, context 1984–2016"
OUTSIDE = {
    ("smollm2", 1): "SmolLM2 batch 1, outside the executor",
    ("smollm2", 16): "SmolLM2 batch 16, outside the executor",
    ("llama-587m", 1): "587M batch 1, outside the executor",
}
"""Model and batch to the share of a decode step that is not spent in the executor's call."""
READY, RESIDENT, EXCESS = "start to ready, s", "resident after 16 requests, MB", "resident above plan and pool, MB"
LOADED = "start to first answer, s"
KL = "KL from the same graph in fp32, nats per token"

UNITS: Mapping[str, str] = {
    "decode": "tokens/s",
    "prefill": "tokens/s",
    "large": "tokens/s",
    "concurrent": "output tokens/s",
    "context": "tokens/s",
    "overhead": "% of a decode step",
    "serve": "",
    "footprint": "",
    "quality": "",
}
"""Section to what its figures are, in the order sections run; "" where each metric says so itself."""
