"""CUDA kernels of our own, compiled while a plan is built: what a TensorRT engine cannot say itself.

Each kernel is a Triton function with its meaning in NumPy beside it. Plans carry the compiled images, so the machine
that serves needs no Triton. Triton is imported when kernels are compiled, never before.
"""
