"""Arrays of a sweep in a replay: their progress, and which members are in which array.

An array trains its members in lockstep: they share its throughput equally. Members that end leave at no cost; an array
that other members join or leave loses ``up`` seconds, as a trainer that grows.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidSettings, did_you_mean
from freetrain_parsl.extensions.fusion.curve import FusionCurve
from freetrain_parsl.extensions.replay.accounts import Account

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from freetrain_parsl.planning.model import PlannedJob

__all__ = ["FUSION_CURVES", "ArrayAccount", "Sweep", "arrange", "fusion_curve", "throughput"]

_LEAST_GAIN = 1e-9  # in throughput relative to one member: less is a rounding error
FUSION_CURVES: Mapping[str, FusionCurve] = {
    "none": FusionCurve(),
    # HFTA (Wang et al., MLSys 2021), README of github.com/UofT-EcoSystem/hfta: MobileNet-V2, CIFAR-10, one V100 with
    # mixed precision; an epoch takes 6.02 s alone and 7.65 s for three fused models (means of epochs 2 to 5).
    "hfta-mobilenet": FusionCurve([(3, 2.36)]),
    # benchmarks/fusion.py, sessions, Adam: one H100 with batches of 64, and one core of a CPU with batches of 16.
    "h100-mlp": FusionCurve([(16, 2.5)]),
    "h100-cnn": FusionCurve([(16, 2.7)]),
    "h100-pointnet": FusionCurve([(16, 4.1)]),
    "h100-transformer": FusionCurve([(16, 3.4)]),
    "h100-lstm": FusionCurve([(16, 1.8)]),
    "cpu-mlp": FusionCurve([(16, 2.9)]),
    "cpu-cnn": FusionCurve([(16, 1.6)]),
    "cpu-transformer": FusionCurve([(16, 1.3)]),
    # benchmarks/lora.py: Llamas of 256 numbers and 4 layers with adapters, 64 tokens a step, one base; one core.
    "cpu-lora": FusionCurve([(8, 1.6)]),
}
"""Name -> curve. Only one size of each was published or recorded; between it and one member, values are linear."""


@dataclass
class ArrayAccount(Account):
    """An array as the planner's trainer; also a member that trains alone."""

    fusion: FusionCurve = field(default_factory=FusionCurve)
    members: list[Account] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, fusion: FusionCurve, members: Sequence[Account]) -> ArrayAccount:
        """Form an array; members of a sweep are equal but for their names and what they have done."""
        first = members[0]
        array = cls(replace(first.trainer, name=name), first.submitted, first.weight, fusion=fusion)
        array.take(members)
        return array

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    @property
    def work_left(self) -> float:
        """Samples that all members have left."""
        return sum(member.work_left for member in self.members)

    def done(self, now: float) -> bool:  # noqa: ARG002 - as in `Account`
        """Return whether no member is left."""
        return not self.members

    def done_at(self, now: float) -> float:
        """Return when the first member will be done."""
        return min((member.done_at(now) for member in self.members), default=math.inf)

    def run(self, seconds: float) -> None:
        """Let time pass; nodes are attributed to the members in equal parts."""
        super().run(seconds)
        for member in self.members:
            member.run(seconds)
            member.node_seconds += len(self.nodes) * seconds / self.size

    def take(self, members: Sequence[Account]) -> None:
        """Replace the members, at no cost."""
        for member in self.members:
            member.rate = 0.0
        self.members = list(members)
        if self.members:
            curve = self.members[0].trainer.curve.scaled(throughput(self.fusion, self.size))
            self.trainer = replace(self.trainer, curve=curve, work_left=self.work_left)
        self._hold(self.nodes)

    def regroup(self, members: Sequence[Account]) -> float:
        """Replace the members; return the value that this costs."""
        cost = self._charge(self.trainer.costs.up * self.rate)
        for member in self.members:
            member.rescales += 1
        self.take(members)
        return cost

    def preempt(self, lost: frozenset[str]) -> float:
        """Remove nodes; return the value that this costs."""
        for member in self.members:
            member.preemptions += 1
        return super().preempt(lost)

    def rescale(self, nodes: frozenset[str]) -> float:
        """Change the nodes; return the value that this costs."""
        for member in self.members:
            member.rescales += 1
        return super().rescale(nodes)

    def start(self, nodes: frozenset[str], now: float, seconds: float) -> float:
        """Give nodes to an array without nodes; return the value that this costs."""
        for member in self.members:
            member.started = now if member.started is None else member.started
        return super().start(nodes, now, seconds)

    def _charge(self, samples: float) -> float:
        for member in self.members:
            member.samples -= samples / self.size
        return super()._charge(samples)

    def _hold(self, nodes: frozenset[str]) -> None:
        super()._hold(nodes)
        for member in self.members:
            member.rate = self.rate / self.size


@dataclass
class Sweep:
    """The members of a sweep that are not done, all like `trainer`: in arrays, or waiting."""

    name: str
    trainer: PlannedJob
    fusion: FusionCurve
    waiting: deque[Account] = field(default_factory=deque)
    arrays: list[ArrayAccount] = field(default_factory=list)
    _formed: int = 0

    def dissolve(self, array: ArrayAccount) -> None:
        """End an array that has lost its nodes; its members are the first to get others."""
        members = array.members
        array.take(())
        self.arrays = [other for other in self.arrays if other is not array]
        self.waiting.extendleft(reversed(members))

    def rearrange(
        self, slots: int, horizon: float, start: float = 0.0
    ) -> tuple[list[ArrayAccount], list[ArrayAccount], float]:
        """Form, enlarge, split and merge arrays as far as that pays for the changes; see `arrange`.

        Returns
        -------
        formed, changed
            Arrays that are new, and that have other members. Those without members are to be ended.
        cost
            Value that the changes cost.
        """
        sizes = [array.size for array in self.arrays]
        pause = self.trainer.costs.up
        waiting = len(self.waiting)
        wanted = arrange(self.fusion, sizes, waiting, slots, horizon=horizon, pause=pause, start=start)
        changed = [array for array, size in zip(self.arrays, wanted, strict=False) if array.size != size]
        goals = [size for array, size in zip(self.arrays, wanted, strict=False) if array.size != size]
        # All arrays release their surplus before any takes others, whose rates it sets.
        kept = [array.members[:size] for array, size in zip(changed, goals, strict=True)]
        for array, size in zip(changed, goals, strict=True):
            self.waiting.extendleft(reversed(array.members[size:]))
        cost = sum(array.regroup(members) for array, members in zip(changed, kept, strict=True))
        for array, size in zip(changed, goals, strict=True):
            array.take([*array.members, *self._next(size - array.size)])
        formed = [self._form(size) for size in wanted[len(sizes) :]]
        self.arrays = [array for array in self.arrays if array.members] + formed
        return formed, changed, cost

    def _form(self, size: int) -> ArrayAccount:
        self._formed += 1
        return ArrayAccount.of(f"{self.name}[{self._formed}]", self.fusion, self._next(size))

    def _next(self, number: int) -> list[Account]:
        return [self.waiting.popleft() for _ in range(number)]


def throughput(fusion: FusionCurve, members: int) -> float:
    """Return the throughput of an array, relative to one member.

    Members of an array that has become too small to be faster than one by one take turns.
    """
    return max(1.0, fusion(members)) if members else 0.0


def arrange(
    fusion: FusionCurve,
    sizes: Sequence[int],
    waiting: int,
    slots: int,
    *,
    horizon: float,
    pause: float,
    start: float = 0.0,
) -> list[int]:
    """Return the sizes that the arrays should have: first of those that exist, in order, then of new ones.

    Two arrangements are compared by their work within `horizon`, less that lost in the arrays that change: the one of
    largest throughput, and one that is found by moving members while that pays, and disturbs few arrays.

    Parameters
    ----------
    fusion
        Throughput of an array relative to one member.
    sizes
        Numbers of members of the arrays that exist.
    waiting
        Number of members that are in no array.
    slots
        Slots for all arrays, at least as many as there are arrays.
    horizon
        How long the arrangement is expected to last, seconds.
    pause
        Seconds that an array loses when its members change.
    start
        Seconds that a new array loses.
    """
    values = [throughput(fusion, size) for size in range(max(fusion.largest, *sizes, 1) + 1)]

    def work(wanted: Sequence[int]) -> float:
        paused = sum(values[size] for size, after in zip(sizes, wanted, strict=False) if after != size)
        started = sum(values[size] for size in wanted[len(sizes) :])
        return horizon * sum(values[size] for size in wanted) - pause * paused - start * started

    fastest = _matched(sizes, fusion.grouping(sum(sizes) + waiting, slots))
    careful = _moved(values, fusion, sizes, waiting, slots, pause / horizon, start / horizon)
    return max(careful, fastest, key=work)


def _matched(sizes: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Give the largest of the wanted sizes to the largest arrays; the others are new, or no more."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    goals = [0] * len(sizes)
    for index, size in zip(order, wanted, strict=False):
        goals[index] = size
    return [*goals, *wanted[len(sizes) :]]


def _moved(
    values: Sequence[float],
    fusion: FusionCurve,
    sizes: Sequence[int],
    waiting: int,
    slots: int,
    pause: float,
    start: float,
) -> list[int]:
    """Fill the free slots with members that wait; then move members to arrays or free slots, the best moves first.

    `pause` and `start` are the times lost, relative to the horizon.
    """
    new = fusion.grouping(waiting, slots - len(sizes))
    waiting -= sum(new)
    goals = [*sizes, *new]
    while move := _best_move(values, sizes, goals, waiting, slots, pause, start):
        source, target, number = move
        if source is None:
            waiting -= number
        else:
            goals[source] -= number
        if target == len(goals):
            goals.append(0)
        goals[target] += number
    return goals


def _best_move(
    values: Sequence[float],
    sizes: Sequence[int],
    goals: Sequence[int],
    waiting: int,
    slots: int,
    pause: float,
    start: float,
) -> tuple[int | None, int, int] | None:
    """Return where members should come from (``None``: they wait) and go to, and how many; ``None`` if none pays."""
    # Of arrays of one size that have changed already, or have not, one is enough.
    kinds = {(size, index < len(sizes) and size == sizes[index]): index for index, size in enumerate(goals)}
    lost = {index: pause * values[size] * intact for (size, intact), index in kinds.items()}
    targets = [(index, goals[index]) for index in lost]
    if len(goals) < slots:
        targets.append((len(goals), 0))
    best, move = _LEAST_GAIN, None
    for source in [*([None] if waiting else []), *lost]:
        most = waiting if source is None else goals[source] - 1
        for target, size in targets:
            if source == target:
                continue
            for number in range(1, min(most, len(values) - 1 - size) + 1):
                gain = values[size + number] - values[size] - lost.get(target, start * values[number])
                if source is not None:
                    gain += values[goals[source] - number] - values[goals[source]] - lost[source]
                if gain > best:
                    best, move = gain, (source, target, number)
    return move


def fusion_curve(spec: str) -> FusionCurve:
    """Return the curve of a name in `FUSION_CURVES`, or read one from a file.

    Raises
    ------
    InvalidSettings
        It is neither a name nor the path of a file of curves.
    InvalidInput
        The file is invalid; see `FusionCurve.from_file`.
    """
    if spec in FUSION_CURVES:
        return FUSION_CURVES[spec]
    if Path(spec).suffix.lower() not in (".csv", ".json"):
        known = ", ".join(FUSION_CURVES)
        near = did_you_mean(spec, tuple(FUSION_CURVES))
        raise InvalidSettings(f"--fusion: unknown {spec!r}{near}; give a .csv or .json file, or one of {known}")
    return FusionCurve.from_file(spec)
