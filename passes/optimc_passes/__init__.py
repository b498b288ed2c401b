"""Compile time: from a Hugging Face checkpoint to a lowered program. May use torch, transformers and onnx."""
