"""Why idle nodes are in no block of ours, by the planner's own rules, as far as a journal shows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from freetrain_parsl.planning.blocks.rules import why_not
from freetrain_parsl.planning.settings import SettingsInSeconds
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.event_json import restored
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from freetrain_parsl.planning import events as ev

__all__ = ["UnusedWindows"]


class UnusedWindows:
    """Follows a driver's windows and settings; the windows are judged when somebody asks."""

    def __init__(self) -> None:
        self._settings: SettingsInSeconds | None = None
        self._seen: dict[str, Any] | None = None  # the last windows, as in the journal

    def take(self, entry: record.PlannerStarted | record.PlannerStep) -> None:
        """Take the next record."""
        match entry:
            case record.PlannerStarted():
                self._seen = None
                try:
                    self._settings = SettingsInSeconds(**entry.settings)
                except TypeError:  # of another version, whose rules are not these
                    self._settings = None
            case record.PlannerStep(events=events):
                self._seen = next((event for event in reversed(events) if "windows" in event), self._seen)

    def reasons(self, now: float, pending: int) -> list[str]:
        """Return why windows are not used, one line for each reason; none if nothing but the policy decides.

        Parameters
        ----------
        now
            Seconds since the epoch.
        pending
            Our blocks that wait in the queue.
        """
        if self._settings is None or self._seen is None:
            return []
        try:
            seen: ev.WindowsSeen = restored(self._seen)
        except (KeyError, TypeError, ValueError):  # as above
            return []
        nodes: defaultdict[str, list[str]] = defaultdict(list)
        for window in seen.windows:
            reason = why_not(window, self._settings, seen.terms_by_kind.get(window.node_kind, seen.terms), now)
            if reason is None and pending >= self._settings.max_pending_blocks:
                reason = f"{pending} of our blocks wait in the queue, the maximum"
            if reason is not None:
                nodes[reason].extend(window.nodes)
        return [f"idle nodes not used: {show_hosts(names)}: {reason}" for reason, names in nodes.items()]
