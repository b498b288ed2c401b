"""GPTQ or AWQ by llm-compressor, in its own environment: quantize a folder with given tokens, save, say versions.

python llmcompressor_worker.py gptq|awq MODEL TOKENS.npy OUTPUT GROUP
"""

import importlib.metadata
import json
import sys

import numpy as np
import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform import AWQModifier
from transformers import AutoModelForCausalLM

method, model_folder, tokens_file, output, group = sys.argv[1:]
tokens = np.load(tokens_file)
rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": int(group)}
groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
if method == "gptq":
    recipe = [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
else:
    # Its AWQ pins memory for a device that is not there.
    torch.Tensor.pin_memory = lambda self, *_: self
    recipe = [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]
model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
oneshot(
    model=model,
    dataset=Dataset.from_list(rows),
    recipe=recipe,
    max_seq_length=tokens.shape[1],
    num_calibration_samples=len(rows),
    shuffle_calibration_samples=False,
)
model.save_pretrained(output, save_compressed=True)
names = ("llmcompressor", "compressed-tensors", "torch", "transformers")
print("\n" + json.dumps({"versions": {name: importlib.metadata.version(name) for name in names}}))
