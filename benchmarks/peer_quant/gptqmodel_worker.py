"""GPTQ by GPTQModel, in its own environment: quantize a folder with given tokens, save, say versions.

python gptqmodel_worker.py MODEL TOKENS.npy OUTPUT GROUP
"""

import importlib.metadata
import json
import sys

import numpy as np
import torch
from gptqmodel import GPTQModel, QuantizeConfig

model_folder, tokens_file, output, group = sys.argv[1:]
tokens = np.load(tokens_file)
rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
config = QuantizeConfig(bits=4, group_size=int(group), sym=False, desc_act=True, act_group_aware=False)
model = GPTQModel.load(model_folder, config, device="cpu", dtype=torch.float32)
model.quantize(rows, batch_size=1)
model.save(output)
versions = {name: importlib.metadata.version(name) for name in ("gptqmodel", "torch", "transformers")}
print("\n" + json.dumps({"versions": versions}))
