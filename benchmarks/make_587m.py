"""Write models/llama-587m: the shape of a larger Llama with random weights, to measure speed without a download.

    python benchmarks/make_587m.py [--output models/llama-587m] [--tokenizer models/smollm2-135m-instruct.gguf]

587,237,376 parameters in bfloat16 (1.2 GB): 8 layers of hidden 2048 and intermediate 8192, 32 query and 8 key/value
heads of 64, the vocabulary of 49,152 and the tokenizer of SmolLM2, the head tied to the embedding. What it says is
noise; how fast it says it depends on shapes alone. The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from optimc_passes.load.gguf import convert_gguf

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 2048, 8192, 32, 8, 64
STD = 0.02
"""Of the normal distribution weights are drawn from: Llama's initialization."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("models/llama-587m"))
    parser.add_argument("--tokenizer", type=Path, default=Path("models/smollm2-135m-instruct.gguf"))
    options = parser.parse_args()
    if (options.output / "model.safetensors").exists():
        print(f"{options.output} is there already")
        return
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.output.parent) as scratch:
        folder = Path(scratch) / "checkpoint"
        write_checkpoint(convert_gguf(options.tokenizer, Path(scratch), lambda _config: None), folder)
        folder.rename(options.output)
    print(f"wrote {options.output}")


def write_checkpoint(like: Path, folder: Path) -> None:
    """Write the checkpoint to `folder` with the tokenizer and the special tokens of the Llama checkpoint in `like`."""
    config = json.loads((like / "config.json").read_text("utf-8"))
    draw = np.random.default_rng(587)
    tensors = {name: random_weight(shape, draw) for name, shape in shapes(config["vocab_size"]).items()}
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(like / name, folder)
    (folder / "config.json").write_text(json.dumps(reshaped(config), indent=2, sort_keys=True), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reshaped(config: dict[str, Any]) -> dict[str, Any]:
    """Return a Llama configuration with the sizes above, everything else as it was."""
    return config | {
        "dtype": "bfloat16",
        "head_dim": HEAD_DIM,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": True,
    }


def shapes(vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape, matrices [out, in]."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab_size, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
            f"{prefix}.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
    return {f"{module}.weight": shape for module, shape in found.items()}


def random_weight(shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    """Return bfloat16 values: a matrix at random, a norm's vector all ones."""
    if len(shape) == 1:
        return np.ones(shape, ml_dtypes.bfloat16)
    return (draw.standard_normal(shape, np.float32) * STD).astype(ml_dtypes.bfloat16)


if __name__ == "__main__":
    main()
