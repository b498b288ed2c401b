"""The TensorRT executor. Nothing here imports TensorRT or CUDA before a plan built for them is loaded.

Read `executor.py` first: what a step does. `calls.py` cuts it into calls, `call_inputs.py` lays one out, `contexts.py`
runs it, `row_kernels.py` commits its K/V rows, `assembly.py` is how a plan gets there. `cuda.py` and `engine.py` alone
talk to the driver and to TensorRT.
"""
