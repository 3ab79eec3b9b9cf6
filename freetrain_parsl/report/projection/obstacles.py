"""What keeps a driver's trainings from nodes that are there: blocks that are refused, and nodes that cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.protocol import journal as record
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Obstacles"]

_REFUSED = "was refused: "
"""How the reason begins for which a block ended that the batch system did not accept."""


class Obstacles:
    """Follows the records of one driver."""

    def __init__(self) -> None:
        self._refusals = 0
        self._refusal = ""
        self._set_aside: dict[str, tuple[float, str]] = {}  # node -> when it rejoins, and why it was set aside
        self._different: dict[str, str] = {}  # node -> why no training can run there

    def take(self, time: float, entry: record.Record) -> None:
        """Take the next record."""
        match entry:
            case record.BlockEnded(reason=reason) if reason.startswith(_REFUSED):
                self._refusals += 1
                self._refusal = reason.removeprefix(_REFUSED)
            case record.BlockStarted():
                self._refusals = 0
            case record.NodeSetAside(subject=node):
                self._set_aside[node] = (time + entry.seconds, entry.reason)
            case record.EnvironmentDiffers(subject=node, refused=True):
                self._different[node] = entry.difference
            case record.NodeJoined(subject=node):
                self._set_aside.pop(node, None)
                self._different.pop(node, None)

    def reasons(self, now: float) -> list[str]:
        """Return what is so at `now`, seconds since the epoch, one line for each reason."""
        lines = []
        if self._refusals:
            last = "the last block was" if self._refusals == 1 else f"the last {self._refusals} blocks were"
            lines.append(f"{last} refused by the batch system: {self._refusal}")
        aside = {node: why for node, (until, why) in self._set_aside.items() if until > now}
        lines += [f"set aside: {nodes}: {why}" for why, nodes in _by_reason(aside)]
        lines += [f"no training can run on {nodes}: {why}" for why, nodes in _by_reason(self._different)]
        return lines


def _by_reason(reasons: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for why in dict.fromkeys(reasons.values()):
        yield why, show_hosts([node for node, reason in reasons.items() if reason == why])
