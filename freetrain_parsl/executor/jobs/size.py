"""The size of a training job: as its user states it, in nodes or accelerators, and in the units that are planned.

A unit is a node, or one slot of a node where jobs share nodes. A slot is one accelerator, or one share of a CPU node.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import ceil

from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.planning.curves.scaling import ScalingCurve
from freetrain_parsl.planning.sizes import round_down, round_up, sizes_within
from freetrain_parsl.settings_checks import check_count

__all__ = ["Size", "same_bound"]

_MOST = 1_000_000  # more than any cluster has; the planner tabulates a rate for each number of units
_BOUNDS = (("accelerators", "min_accelerators", "min_nodes"), ("accelerators", "max_accelerators", "max_nodes"))


def same_bound(one: str, other: str) -> bool:
    """Return whether two fields of `Size` state the same bound, in two ways."""
    return one != other and any(one in words and other in words for words in _BOUNDS)


@dataclass(frozen=True)
class Size:
    """Bounds on the size of a training job, as stated; ``None``: not stated.

    Parameters
    ----------
    min_nodes, max_nodes
        Numbers of whole nodes.
    accelerators
        Exact number of accelerators.
    min_accelerators, max_accelerators
        Numbers of accelerators.
    """

    min_nodes: int | None = None
    max_nodes: int | None = None
    accelerators: int | None = None
    min_accelerators: int | None = None
    max_accelerators: int | None = None

    def check(self, who: str) -> None:
        """Check what can be checked without knowing the site; `who` begins the messages.

        Raises
        ------
        InvalidApp
            A number is out of range, two say the same, or a maximum is less than the minimum.
        """
        stated = {word: number for word, number in vars(self).items() if number is not None}
        try:
            for word, number in stated.items():
                check_count(f"{who}: {word}", number, most=_MOST)
        except InvalidSettings as error:
            raise InvalidApp(str(error)) from None
        for one, other in combinations(stated, 2):
            if same_bound(one, other):
                raise InvalidApp(
                    f"{who}: {one}={stated[one]} and {other}={stated[other]} state the same bound; leave one out"
                )
        for unit in ("nodes", "accelerators"):
            least, most = stated.get(f"min_{unit}", 1), stated.get(f"max_{unit}")
            if most is not None and most < least:
                raise InvalidApp(
                    f"{who}: max_{unit} ({most}) is less than min_{unit} ({least}); raise it, or lower min_{unit}"
                )

    @property
    def counts_accelerators(self) -> bool:
        """Whether a bound is stated in accelerators; the points of its scaling curve then are."""
        stated = (self.accelerators, self.min_accelerators, self.max_accelerators)
        return any(count is not None for count in stated)

    @property
    def least(self) -> str:
        """What states the lower bound, such as ``min_nodes=2``; empty: nothing does."""
        return self._words(*_BOUNDS[0])

    @property
    def most(self) -> str:
        """What states the upper bound; empty: nothing does."""
        return self._words(*_BOUNDS[1])

    def _words(self, *words: str) -> str:
        return next((f"{word}={vars(self)[word]}" for word in words if vars(self)[word] is not None), "")

    @property
    def assumed(self) -> tuple[int, int]:
        """The bounds before the site is known: as if each node had one slot."""
        least = self.min_nodes or self.accelerators or self.min_accelerators or 1
        return least, max(least, self.max_nodes or self.max_accelerators or 1)

    def in_units(self, who: str, slots_per_node: int, units_per_node: int = 1) -> tuple[int, int]:
        """Return the bounds in units: at a site with whole nodes, numbers of accelerators are rounded up to nodes.

        Nothing stated is from one unit to one node, or to the minimum if that is more.

        Parameters
        ----------
        who
            Begins messages.
        slots_per_node
            Number of slots of a node.
        units_per_node
            The same where jobs share nodes, 1 where the unit is the node.

        Raises
        ------
        InvalidApp
            The bounds contradict each other on these nodes, or no job can have such a size.
        """
        exact = self.accelerators
        least = self._units(self.min_nodes, exact or self.min_accelerators, slots_per_node, units_per_node) or 1
        most = self._units(self.max_nodes, exact or self.max_accelerators, slots_per_node, units_per_node)
        most = max(units_per_node, least) if most is None else most
        if most < least:
            raise InvalidApp(
                f"{who}: {self.most} is less than {self.least} on nodes of {slots_per_node} accelerators; "
                "raise it, or lower the minimum"
            )
        if units_per_node == 1:
            return least, most
        fitting, below = round_up(least, units_per_node), round_down(min(most, _MOST), units_per_node)
        if fitting <= below:
            return fitting, below
        bounds = " and ".join(dict.fromkeys(filter(None, (self.least, self.most))))
        raise InvalidApp(
            f"{who}: {bounds}: a job has {', '.join(map(str, sizes_within(units_per_node)))} accelerators or whole "
            f"nodes of {units_per_node} here; the nearest sizes are {below} and {fitting} accelerators"
        )

    @staticmethod
    def _units(nodes: int | None, accelerators: int | None, slots_per_node: int, units_per_node: int) -> int | None:
        if nodes is not None:
            return nodes * units_per_node
        return None if accelerators is None else ceil(accelerators * units_per_node / slots_per_node)

    def rounding(self, slots_per_node: int, units_per_node: int = 1) -> str:
        """Return what is rounded up to whole nodes; empty: nothing is."""
        exact = self.accelerators
        counts = [exact or self.min_accelerators, exact or self.max_accelerators]
        if units_per_node > 1 or all(count is None or count % slots_per_node == 0 for count in counts):
            return ""
        stated = [self._words(word) for word in ("accelerators", "min_accelerators", "max_accelerators")]
        nodes = dict.fromkeys(str(ceil(count / slots_per_node)) for count in counts if count is not None)
        return (
            f"{', '.join(filter(None, stated))} is rounded up to {' and '.join(nodes)} whole nodes of {slots_per_node} "
            "accelerators, as jobs do not share nodes here"
        )

    def curve_in_units(self, curve: ScalingCurve, slots_per_node: int, units_per_node: int = 1) -> ScalingCurve:
        """Return a scaling curve over units; the default curve, and one that is to be learned, are over any unit.

        A curve over nodes is assumed to be linear from zero inside the first node, until that is measured.
        """
        if curve.unknown or curve == ScalingCurve.default():
            return curve
        points, factor = dict(curve.points), 1.0
        if self.counts_accelerators and units_per_node == 1 < slots_per_node:
            # The line through these whole nodes is exact at all of them: between two there is no point of the curve.
            ends = {count for point in points for count in (point // slots_per_node, ceil(point / slots_per_node))}
            known = sorted(count for count in ends if count * slots_per_node >= curve.first_nodes)
            points, factor = {count: curve(count * slots_per_node) for count in known}, 1 / slots_per_node
        elif not self.counts_accelerators and units_per_node > 1:
            inside = {1: points[1] / units_per_node} if 1 in points else {}
            points = {**inside, **{count * units_per_node: rate for count, rate in points.items()}}
            factor = float(units_per_node)
        else:
            return curve
        # A relative curve is relative to one unit.
        converted = ScalingCurve(points, relative=curve.relative)
        return converted.scaled(factor) if curve.relative else converted
