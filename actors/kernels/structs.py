"""The structures of ``native/warmroot.h`` that describe a decoder and a step."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p


class KvCacheStruct(ctypes.Structure):
    """wr_kv_cache"""

    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("format", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("open_keys", c_void_p),
        ("open_pages", c_void_p),
    ]


class LayerStruct(ctypes.Structure):
    """wr_layer"""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", c_void_p),
        ("num_qkv", c_int32),
        ("group", c_int32),
        ("out", c_void_p),
        ("gate_up", c_void_p),
        ("num_gate_up", c_int32),
        ("rope", c_int32),
        ("down", c_void_p),
        ("cache", KvCacheStruct),
    ]


class DecoderStruct(ctypes.Structure):
    """wr_decoder"""

    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        *((name, c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "inner")),
        ("rotary_dim", c_int32),
        ("activation", c_int32),
        *((name, c_float) for name in ("norm_eps", "scale", "softcap")),
    ]


class StepStruct(ctypes.Structure):
    """wr_step"""

    _fields_ = [
        ("rows", c_int64),
        ("cos", POINTER(c_void_p)),
        ("sin", POINTER(c_void_p)),
        ("plans", POINTER(c_void_p)),
        ("slots", POINTER(c_void_p)),
        ("group", c_void_p),
        ("adds_residual", c_int32),
    ]
