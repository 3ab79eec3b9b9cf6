"""How operators of torch compute on the stacked tensors of an array's members.

`torch.vmap` knows most operators. The rules here take the place of what it does wrongly, slowly or not at all; what
neither knows runs row by row. A value that decides about the further course must be the same for all members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.extensions.fusion.forward.operators import decisions, layers, randomness, recurrent
from freetrain_parsl.extensions.fusion.forward.operators.mode import FusedOperators, Rule, reason_of

if TYPE_CHECKING:
    from typing import Any

    from freetrain_parsl.extensions.fusion.engine.per_member import RandomStreams
    from freetrain_parsl.extensions.fusion.forward.vmap_level import VmapLevel

__all__ = ["RULES", "FusedOperators", "fused_operators", "reason_of"]

RULES: dict[Any, Rule] = {
    **randomness.RULES,
    **layers.RULES,
    **recurrent.RULES,
    **decisions.RULES,
}


def fused_operators(level: VmapLevel, streams: RandomStreams) -> FusedOperators:
    """Return the mode in which operators follow the rules of this package."""
    return FusedOperators(level, streams, RULES)
