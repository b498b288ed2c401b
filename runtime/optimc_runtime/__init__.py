"""Serve time: loads an engine.plan and answers requests. Imports neither torch nor transformers nor onnx."""
