"""Where is the compiled arithmetic? `LIBRARY`: kernels.c as it was compiled when peerd was installed, or None.

A node without it trains the same, only slower: each operation of numpy is a pass through memory of its own, and an
exchange takes 1.4 to 1.7 times as long (benchmarks/exchange.py). numba would bring a compiler of its own, for the
versions of Python that it knows; torch's own kernels do one operation a pass, too, and daemons do not import torch.
"""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

VERSION = 7  # of the signatures: what an earlier peerd left here must not be called by today's
ARRAY, COUNT, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "peerd_squares": (None, [ARRAY, ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_scale": (None, [ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_sign_encode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY, ARRAY, ARRAY, ARRAY]),
    "peerd_sign_decode": (None, [ARRAY, ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_sign_largest_encode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY, ARRAY, ARRAY, ARRAY]),
    "peerd_sign_largest_decode": (None, [ARRAY, ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_int8_encode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY, ARRAY, ARRAY, ARRAY, REAL, REAL]),
    "peerd_int8_decode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_int4_encode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY, ARRAY, ARRAY, ARRAY, REAL]),
    "peerd_int4_decode": (ctypes.c_int, [ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_at_least": (COUNT, [ARRAY, ARRAY, COUNT, REAL, ARRAY, ARRAY, ARRAY]),
    "peerd_add_within": (ctypes.c_int, [ARRAY, ARRAY, COUNT, REAL, ARRAY]),
    "peerd_move_references": (None, [ARRAY, ARRAY, ARRAY, ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_add": (None, [ARRAY, ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_mean": (None, [ARRAY, ARRAY, COUNT, REAL, ARRAY]),
    "peerd_blocks_pack": (None, [ARRAY, COUNT, ARRAY, ARRAY]),
    "peerd_blocks_unpack": (None, [ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_blocks_move": (None, [ARRAY, ARRAY, ARRAY, ARRAY, ARRAY, ARRAY, COUNT]),
    "peerd_carry_join": (None, [ARRAY, ARRAY, COUNT, ARRAY]),
    "peerd_carry_part": (None, [ARRAY, COUNT, ARRAY, ARRAY]),
    "peerd_carry_add": (None, [ARRAY, ARRAY, ARRAY, ARRAY, COUNT]),
    "peerd_is_finite": (ctypes.c_int, [ARRAY, COUNT]),
}


def _load() -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"compiled{suffix}")
        try:
            library = ctypes.CDLL(str(path))
            if ctypes.c_int32.in_dll(library, "peerd_kernels_version").value != VERSION:
                continue
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, ValueError, AttributeError):  # not there, of another processor, or of another version
            continue
        return library
    return None


LIBRARY = _load()
