"""How do modes with links end a run, and how often do they change partners?"""

from __future__ import annotations

FLUSH_CODEC = "int8"  # its contraction is above 0.999, so a handful of exchanges reach agreement
FLUSH_TOLERANCE = 1e-2  # relative distance at which two models count as one; a test accuracy does not resolve it
ROTATE_AFTER_EXCHANGES = 64  # a new link costs a bfloat16 snapshot, about 16 one-bit deltas: a quarter on top at most
