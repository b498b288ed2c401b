"""Checks of the TensorRT target that need a GPU; `gpu_check.py` runs them."""
