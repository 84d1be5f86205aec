"""The C structures of `step.cpp`, field for field."""

from __future__ import annotations

import ctypes

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")

_Pointer, _Int = ctypes.c_void_p, ctypes.c_int32


class Weight(ctypes.Structure):
    _fields_ = (
        ("data", _Pointer),
        ("bias", _Pointer),
        ("format", _Int),
        ("outputs", _Int),
        ("inputs", _Int),
        ("unused", _Int),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Weight) for name in PROJECTIONS),
        *((name, _Pointer) for name in NORMS),
        ("window", ctypes.c_int64),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", _Pointer),
        ("embedding", Weight),
        ("head", Weight),
        ("norm", _Pointer),
        *((name, _Int) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "inner")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class Pool(ctypes.Structure):
    _fields_ = (
        ("data", _Pointer),
        *((name, _Int) for name in ("type", "kv_heads", "layers", "block_size", "head_dim", "unused")),
    )


class Step(ctypes.Structure):
    _fields_ = (
        *((name, _Pointer) for name in ("tokens", "cos", "sin", "spans", "tables", "rows", "logits", "seconds")),
        ("pool", Pool),
        *((name, _Int) for name in ("num_tokens", "num_spans", "num_rows", "unused")),
    )
