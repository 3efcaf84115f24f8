"""How long does anyone wait for a peer, and when is it tried again? The same in a daemon and in the simulator."""

from __future__ import annotations

DIAL_TIMEOUT_S = 5.0
GREETING_DEADLINE_S = 5.0
PATIENCE_S = 10.0  # without anything coming through in the middle of a message
SLOWEST_RATE = 64 << 10  # bytes a second; a slower connection is given up. Half of 1 Mbit/s, which is to work still
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0  # a peer that comes back is found again within this; a dead one is forgotten by membership
