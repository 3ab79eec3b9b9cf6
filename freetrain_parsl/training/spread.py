"""Tensors of which each process has a part (DTensor)."""

from __future__ import annotations

import sys
from typing import Any


def is_spread(leaf: Any) -> bool:
    """Return whether the members hold different parts of a tensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return tensors is not None and isinstance(leaf, tensors.DTensor)
