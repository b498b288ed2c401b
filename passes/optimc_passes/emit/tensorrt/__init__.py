"""Lowering to TensorRT: the graph as it is told to TensorRT, and the engines made of it."""
