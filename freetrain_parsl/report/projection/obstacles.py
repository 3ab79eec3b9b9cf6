"""What keeps a driver's jobs from nodes: refused blocks, and nodes, windows and slots that are not used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.places import node_of
from freetrain_parsl.planning.blocks import why_not
from freetrain_parsl.planning.settings import SettingsInSeconds
from freetrain_parsl.planning.sizes import AllowedCounts
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import restored
from freetrain_parsl.windows.hostlist import show_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from freetrain_parsl.planning import events as ev

__all__ = ["FailedStarts", "FreeUnits", "Obstacles", "UnusedWindows"]

_REFUSED = "was refused: "
"""How the reason begins for which a block ended that the batch system did not accept."""


@dataclass(frozen=True)
class FailedStarts:
    """The last attempts to start a block failed.

    Parameters
    ----------
    count, most
        Consecutive failed attempts; after `most`, no more blocks are submitted.
    next_attempt
        Earliest time of the next attempt, seconds since the epoch; ``None``: no further attempt.
    reason
        Reason of the last failure.
    """

    count: int
    most: int
    next_attempt: float | None
    reason: str

    @classmethod
    def of(cls, entry: record.StartsFailed) -> FailedStarts | None:
        """Return what a record says; ``None``: a block has started again."""
        return cls(entry.count, entry.most, entry.next_attempt, entry.reason) if entry.count else None

    def sentence(self, now: float) -> str:
        """Describe it in one line."""
        if self.next_attempt is None:
            when = "nothing is submitted any more"
        else:
            when = f"next attempt in {max(0.0, self.next_attempt - now):.0f} s"
        return f"the last {self.count} of at most {self.most} attempts to start a block failed, {when}; {self.reason}"


class Obstacles:
    """Follows the records of one driver."""

    def __init__(self) -> None:
        self._refusals = 0
        self._refusal = ""
        self._set_aside: dict[str, tuple[float, str]] = {}  # node or slot -> when it rejoins, and why
        self._different: dict[str, str] = {}  # node -> why no training job can run there

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
                self._set_aside = {unit: why for unit, why in self._set_aside.items() if node_of(unit) != node}
                self._different.pop(node, None)

    def reasons(self, now: float) -> list[str]:
        """Return what is so at `now`, seconds since the epoch, one line for each reason."""
        lines = []
        if self._refusals:
            last = "the last block was" if self._refusals == 1 else f"the last {self._refusals} blocks were"
            lines.append(f"{last} refused by the batch system: {self._refusal}")
        aside = {node: why for node, (until, why) in self._set_aside.items() if until > now}
        lines += [f"set aside: {nodes}: {why}" for why, nodes in _by_reason(aside)]
        lines += [f"no training job can run on {nodes}: {why}" for why, nodes in _by_reason(self._different)]
        return lines


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


class FreeUnits:
    """Follows which nodes, or slots of shared ones, a driver's planner has, and which of them jobs and tasks have.

    It has to take all steps of the planner.
    """

    def __init__(self) -> None:
        self._slots_per_node = 1
        self._blocks: dict[str, str] = {}  # node or slot -> its block
        self._jobs: dict[str, Mapping[str, Any]] = {}  # job -> the last event that describes it
        self._least: dict[str, tuple[int, AllowedCounts]] = {}  # job -> its least number of slots, and those allowed
        self._held: dict[str, list[str]] = {}  # job -> its slots
        self._lent: list[str] = []

    def take(self, entry: record.PlannerStarted | record.PlannerStep) -> None:
        """Take the next record."""
        match entry:
            case record.PlannerStarted(slots_per_node=slots):
                self._blocks, self._least, self._held, self._lent, self._jobs = {}, {}, {}, [], {}
                self._slots_per_node = slots
            case record.PlannerStep():
                for change in (*entry.events, *entry.actions):
                    self._follow(change)

    def _follow(self, change: Mapping[str, Any]) -> None:
        match change:
            case {"type": "nodes_joined", "block": block, "nodes": nodes}:
                self._blocks |= {node["name"]: block for node in nodes}
            case {"type": "nodes_left", "nodes": nodes}:
                self._blocks = {slot: block for slot, block in self._blocks.items() if slot not in nodes}
            case {"type": "block_ended" | "release_block", "block": ended}:
                self._blocks = {slot: block for slot, block in self._blocks.items() if block != ended}
            case {
                "type": "trainer_submitted" | "trainer_learned",
                "trainer": {"name": name, "min_nodes": least} as job,
            }:
                rule = {field: value for field, value in job.get("allowed_counts", {}).items() if field != "type"}
                self._least[name] = least, AllowedCounts(**rule)
                self._jobs[name] = change
            case {"type": "trainer_finished" | "trainer_failed" | "trainer_withheld", "trainer": name}:
                self._least.pop(name, None)
                self._jobs.pop(name, None)
                self._held.pop(name, None)
            case {"type": "trainer_holds", "trainer": name, "nodes": nodes}:
                self._held[name] = nodes
            case {"type": "assign" | "grow" | "shrink" | "stop", "trainer": name, "nodes": nodes}:
                self._held[name] = nodes
            case {"type": "lend", "nodes": nodes}:
                self._lent = nodes

    @property
    def _free(self) -> set[str]:
        return self._blocks.keys() - {slot for slots in self._held.values() for slot in slots} - set(self._lent)

    def why_not_more(self, name: str) -> str:
        """Say why a job that runs has none of the free units, too; empty: none is free, or it can use no more."""
        held, free = len(self._held.get(name, ())), len(self._free)
        if not (held and free and name in self._jobs):
            return ""
        try:
            described: ev.TrainerSubmitted | ev.TrainerLearned = restored(self._jobs[name])
        except (KeyError, TypeError, ValueError):  # of another version
            return ""
        job, unit = described.trainer, "node" if self._slots_per_node == 1 else "accelerator"
        larger = job.at_least(held + 1, self._slots_per_node)
        if not larger:
            return ""
        there = f"{free} {unit}{' is' if free == 1 else 's are'} free"
        if larger > held + free:
            return f"{there}, and the next number that it may have is {larger}"
        best = max(range(larger, held + free + 1), key=lambda count: job.rate(count) if job.may_have(count) else 0.0)
        if not job.curve.relative and job.rate(best) <= job.rate(held):
            return (
                f"{there}, on which it would not be faster: {job.rate(held):.3g} samples/s on {held}, "
                f"{job.rate(best):.3g} on {best}"
            )
        return f"{there}, and the policy expects a change to cost more than it gains"

    def sentence(self) -> str:
        """Say which slots are free that none of the waiting jobs can use, and why; empty: there are none."""
        from freetrain_parsl.planning.explain import least_size, why_free  # which imports the solver

        if self._slots_per_node == 1:
            return ""
        free = self._free
        sizes = {name: least_size(*least, self._slots_per_node) for name, least in self._least.items()}
        waiting = {name: size for name, size in sizes.items() if size and not self._held.get(name)}
        why = why_free(free, waiting, self._slots_per_node)
        number = "1 accelerator is" if len(free) == 1 else f"{len(free)} accelerators are"
        return f"{number} free ({show_hosts(free, self._slots_per_node)}): {why}" if why else ""


def _by_reason(reasons: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for why in dict.fromkeys(reasons.values()):
        yield why, show_hosts([node for node, reason in reasons.items() if reason == why])
