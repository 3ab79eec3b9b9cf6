"""The planner's rules for blocks: how large a block in a window may be, and why a window gets none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from freetrain_parsl.planning.model import BlockTerms, Window
    from freetrain_parsl.planning.settings import SettingsInSeconds

__all__ = ["block_size", "block_walltime", "format_span", "least_walltime", "why_not"]


def block_walltime(window: Window, settings: SettingsInSeconds, terms: BlockTerms, now: float) -> float:
    """Return the walltime of a block that ends before the window closes even if it starts late, s; zero for none."""
    most = settings.hidden_jobs_walltime if terms.hides_waiting else settings.max_walltime
    longest = min(most, settings.max_walltime, terms.max_walltime, window.remaining(now) - terms.start_delay)
    return max(0.0, math.floor(longest / terms.walltime_step) * terms.walltime_step)


def least_walltime(settings: SettingsInSeconds) -> float:
    """Return the walltime of the shortest block that is worth its start, s."""
    return settings.startup + settings.min_useful + settings.closing_margin


def block_size(settings: SettingsInSeconds, terms: BlockTerms) -> int | None:
    """Return the maximum number of nodes per block; ``None`` for no limit."""
    limits = [limit for limit in (settings.max_nodes_per_block, terms.max_nodes) if limit is not None]
    return min(limits, default=None)


def why_not(window: Window, settings: SettingsInSeconds, terms: BlockTerms, now: float) -> str | None:
    """Explain why no block in this window is worthwhile, whatever the trainings; ``None`` if one is."""
    if window.opens > now:
        return f"opens in {format_span(window.opens - now)}"
    if len(window.nodes) < terms.min_nodes:
        return f"fewer nodes than the minimum of {terms.min_nodes} per job"
    walltime = block_walltime(window, settings, terms, now)
    if walltime < least_walltime(settings):
        late = f"start within {format_span(terms.start_delay)} + " if terms.start_delay else ""
        return (
            f"shorter than {late}start-up {format_span(settings.startup)} + "
            f"minimum {format_span(settings.min_useful)} + margin {format_span(settings.closing_margin)}"
            + (f", in steps of {format_span(terms.walltime_step)}" if terms.walltime_step > 1 else "")
        )
    return None


def format_span(seconds: float) -> str:
    """Format a duration briefly: ``40 s``, ``12 min``, ``1 h 30 min``."""
    seconds = round(seconds)
    if seconds < 120 and seconds != 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
