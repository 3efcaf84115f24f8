"""peerd: GPU nodes that train one model together, with no master.

`import peerd` is light: torch and trio are imported only when `attach` is called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peerd.trainer.swarm import Swarm as Swarm
    from peerd.trainer.swarm import attach as attach

__all__ = ["Swarm", "attach"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("peerd.trainer.swarm"), name)
    raise AttributeError(f"module 'peerd' has no attribute {name!r}")
