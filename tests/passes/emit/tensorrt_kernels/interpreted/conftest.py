"""Lets Triton's interpreter compute in bfloat16 as GPUs do.

It keeps bfloat16 as 16-bit integers, multiplies them as such, converts integers to it as to integers, and cuts float32
off where hardware rounds to the nearest.
"""

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot, _narrow, _from_int = (
    InterpreterBuilder.create_dot,
    InterpreterBuilder.create_fp_trunc,
    InterpreterBuilder.create_si_to_fp,
)


def _as_float32(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)


def _to_bfloat16(original):
    def convert(self, src, dst_type):
        if dst_type.scalar != tl.bfloat16:
            return original(self, src, dst_type)
        return TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)

    return convert


InterpreterBuilder.create_dot = lambda self, a, b, *rest: _dot(self, _as_float32(a), _as_float32(b), *rest)
InterpreterBuilder.create_fp_trunc = _to_bfloat16(_narrow)
InterpreterBuilder.create_si_to_fp = _to_bfloat16(_from_int)
