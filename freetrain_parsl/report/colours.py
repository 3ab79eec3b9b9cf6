"""One colour per training job, the same in the terminal and in pictures."""

from __future__ import annotations

__all__ = ["colour_of"]

# The colour-blind-safe palette of Okabe and Ito (2008), then four more; grey is reserved for main jobs.
_COLOURS = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#CC79A7",
    "#0072B2",
    "#D55E00",
    "#F0E442",
    "#7B4FA3",
    "#8C6D31",
    "#17BECF",
    "#B5CF6B",
)


def colour_of(index: int) -> str:
    """Return the colour, ``#RRGGBB``, of the training job submitted as number `index` (from 0)."""
    return _COLOURS[index % len(_COLOURS)]
