"""The codecs: a new one is one file and one line here; the CLI, the contract tests and the benchmark read the dict."""

from __future__ import annotations

from peerd.training.codecs.bfloat16 import Bfloat16
from peerd.training.codecs.codec import Codec, NotFinite, OnePassCodec
from peerd.training.codecs.float32 import Float32
from peerd.training.codecs.int4 import Int4
from peerd.training.codecs.int8 import Int8
from peerd.training.codecs.sign import Sign
from peerd.training.codecs.sign_largest import SignLargest
from peerd.training.codecs.top_k import TopK
from peerd.training.codecs.top_k_2bit import TopK2Bit

__all__ = ["CODECS", "ONE_PASS", "Codec", "NotFinite"]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Float32(),
        Bfloat16(),
        Int8(),
        Int4(),
        Sign(),
        SignLargest(),
        TopK("top_k", percent=1),
        TopK("top_k_3", percent=3),
        TopK2Bit("top_k_2bit", percent=2),
    )
}
ONE_PASS: dict[str, OnePassCodec] = {name: codec for name, codec in CODECS.items() if isinstance(codec, OnePassCodec)}
"""Those with a kernel; found once, as such a look takes 40 us."""
