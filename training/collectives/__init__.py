"""How do all members of a round learn the sum of their vectors? Shapes to send along, and the machine that follows one.

Both are pure: a rank, a size and a vector go in, pieces for other ranks come out.
"""

from __future__ import annotations

from peerd.training.collectives.collective import Collective, Packing, Piece
from peerd.training.collectives.topology import Topology, choose, parse_topology

__all__ = ["Collective", "Packing", "Piece", "Topology", "choose", "parse_topology"]
