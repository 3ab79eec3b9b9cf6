"""Comparisons of what two processes of a check have recorded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.records import Kind, Leaf, Place, distance

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from freetrain_parsl.extensions.checking.records import ProcessRecord, Scalar, Value

__all__ = ["GradientGap", "StateDifference", "first_culprit", "first_difference", "gradient_gap", "place_text"]

_ORDER = tuple(Kind)
_ZERO = 1e-12  # norms below it are those of rounding


@dataclass(frozen=True)
class StateDifference:
    """The first part of the states of two processes that differs.

    Parameters
    ----------
    place
        Where in the data.
    name, kind
        Of the part.
    one, other
        Its digests.
    """

    place: Place
    name: str
    kind: Kind
    one: Leaf
    other: Leaf

    @property
    def shown(self) -> str:
        """The name as it is written in sentences."""
        return self.name if self.kind in (Kind.RATE, Kind.MOMENT) else f"`{self.name}`"

    def sentence(self) -> str:
        """Return what differs from where on."""
        values = f": {self.other.text} instead of {self.one.text}" if self.one.text != self.other.text else ""
        return f"{self.shown} differs from {place_text(self.place)} on{values}"


def place_text(place: Place) -> str:
    """Return a position in the data for people."""
    epoch, ended, samples, _ = place
    return f"the end of epoch {epoch}" if ended else f"epoch {epoch}, sample {samples}"


def first_difference(
    one: ProcessRecord,
    other: ProcessRecord,
    tolerance: float = 0.0,
    *,
    without: Collection[Kind] = (),
    kinds: Collection[Kind] = _ORDER,
) -> StateDifference | None:
    """Return the first part of the session's state that differs, at places that both have come to.

    Parameters
    ----------
    one, other
        The processes.
    tolerance
        Relative; 0: bits.
    without
        Kinds of parts that may differ.
    kinds
        Kinds that are compared.
    """
    for place in sorted(one.states.keys() & other.states.keys()):
        ours, theirs = one.states[place], other.states[place]
        scales = _scales(ours)
        found = [
            StateDifference(place, name, value.kind, value.leaf, theirs[name].leaf)
            for name, value in ours.items()
            if name in theirs
            and value.kind in kinds
            and value.kind not in without
            and value.leaf.differs(theirs[name].leaf, tolerance, scales[value.family])
        ]
        if found:
            return min(found, key=lambda each: _ORDER.index(each.kind))
    return None


def _scales(states: Mapping[str, Value]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for value in states.values():
        norm = value.leaf.norm
        scales[value.family] = max(scales.get(value.family, 0.0), _ZERO, norm if norm and math.isfinite(norm) else 0.0)
    return scales


@dataclass(frozen=True)
class GradientGap:
    """The first gradient that differs.

    Parameters
    ----------
    number
        Of the step, from 0.
    share
        Norm of the difference, relative to that of the gradient of one process.
    ratio
        By which the gradient of one process must be multiplied to come closest to the other one.
    """

    number: int
    share: float
    ratio: float


def gradient_gap(
    one: ProcessRecord, many: ProcessRecord, tolerance: float, *, steps: int | None = None
) -> GradientGap | None:
    """Compare the gradients of one process with those of several, in the first `steps` or in all."""
    for number, (ours, theirs) in enumerate(zip(one.steps[:steps], many.steps[:steps], strict=False)):
        if not ours.gradients or ours.place != theirs.place:
            continue
        pairs = [(leaf, theirs.gradients.get(name)) for name, leaf in ours.gradients.items() if leaf.norm is not None]
        norm = math.sqrt(sum((leaf.norm or 0.0) ** 2 for leaf, _ in pairs))
        gap = math.sqrt(
            sum(((leaf.norm or 0.0) if other is None else distance(leaf, other)) ** 2 for leaf, other in pairs)
        )
        if gap > tolerance * max(norm, _ZERO) and gap > _ZERO:
            own = sum(a * a for leaf, _ in pairs for a in leaf.sketch)
            both = sum(
                a * b
                for leaf, other in pairs
                if other is not None
                for a, b in zip(leaf.sketch, other.sketch, strict=True)
            )
            return GradientGap(number, gap / max(norm, _ZERO), both / own if own else 0.0)
    return None


def first_culprit(
    alone: ProcessRecord, members: list[ProcessRecord], number: int, tolerance: float
) -> tuple[Scalar, float] | None:
    """Return the first number on the way to a loss that is not the mean of the members', and that mean."""
    if alone.error or any(record.error for record in members):
        return None
    if any(len(record.steps) <= number for record in (alone, *members)):
        return None
    one, many = alone.steps[number], [record.steps[number] for record in members]
    if any(len(step.scalars) != len(one.scalars) for step in many):
        return None
    for index, scalar in enumerate(one.scalars):
        mean = sum(step.scalars[index].value * step.weight for step in many)
        if abs(mean - scalar.value) > tolerance * max(abs(scalar.value), _ZERO):
            return scalar, mean
    return None
