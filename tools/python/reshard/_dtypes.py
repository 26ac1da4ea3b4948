# SPDX-License-Identifier: Apache-2.0
"""Translates torch's dtype names into those of NumPy and torch."""

import sys
import warnings

# Those of NumPy itself; ml_dtypes adds others.
_NUMPY = {
    "bool": "bool", "uint8": "uint8", "int8": "int8", "uint16": "uint16", "int16": "int16", "uint32": "uint32",
    "int32": "int32", "uint64": "uint64", "int64": "int64", "float16": "float16", "float32": "float32",
    "float64": "float64", "complex64": "complex64", "complex128": "complex128",
}  # fmt: skip
_RAW = {"bfloat16": "uint16", "complex32": "uint32"}
_SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float16": "F16",
    "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "float4_e2m1fn_x2": "F4",
}  # fmt: skip
_told = set()


def numpy_type(name):
    """Returns (dtype, whether it is the tensor's own). Without ml_dtypes an unsigned integer stands for bfloat16, float8."""
    import numpy

    if name in _NUMPY:
        return numpy.dtype(_NUMPY[name]), True
    if name not in ("complex32", "float4_e2m1fn_x2"):
        try:
            import ml_dtypes

            return numpy.dtype(getattr(ml_dtypes, name)), True
        except (ImportError, AttributeError):
            pass
    return numpy.dtype(_RAW.get(name, "uint8")), False


def tell_raw(name, dtype):
    """Warns once per dtype that an array contains bits, not values."""
    if name in _told:
        return
    _told.add(name)
    frame, level = sys._getframe(1), 2  # of the caller of this package
    while frame.f_back and frame.f_globals.get("__package__") == __package__:
        frame, level = frame.f_back, level + 1
    advice = (
        "" if name in ("complex32", "float4_e2m1fn_x2") else "pip install ml_dtypes gives an array of that dtype; "
    )
    warnings.warn(
        f"NumPy has no {name}: the array contains its bits as {dtype}. {advice}Tensor.torch() gives a torch tensor",
        stacklevel=level,
    )


def safetensors_name(name):
    """Returns the name that safetensors gives a dtype: "BF16"; torch's if it has none."""
    return _SAFETENSORS.get(name, name)


def torch_type(name):
    import torch

    dtype = getattr(torch, name, None)
    if dtype is None:
        raise TypeError(f"torch {torch.__version__} has no {name}")
    return dtype
