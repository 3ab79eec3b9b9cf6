"""Comparisons of what two processes of a check have recorded, and why the gradient of several is not that of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.records import Kind, Leaf, Place, distance
from freetrain_parsl.extensions.checking.report import Finding, percent, short_place
from freetrain_parsl.extensions.checking.sources import line_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from freetrain_parsl.extensions.checking.records import ProcessRecord, RecordedStep, Scalar, Value

__all__ = [
    "GradientGap",
    "StateDifference",
    "first_culprit",
    "first_difference",
    "gradient_gap",
    "place_text",
    "reason_for_gap",
]

_ORDER = tuple(Kind)
_ZERO = 1e-12  # norms below it are those of rounding


@dataclass(frozen=True)
class StateDifference:
    """The first part of the states of two processes that differs; `one` and `other` are its digests."""

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
) -> StateDifference | None:
    """Return the first part of the session's state that differs, at places that both have come to.

    Kinds in `without` are not compared; a tolerance is relative, and 0 compares bits.
    """
    for place in sorted(one.states.keys() & other.states.keys()):
        ours, theirs = one.states[place], other.states[place]
        scales = _scales(ours)
        found = [
            StateDifference(place, name, value.kind, value.leaf, theirs[name].leaf)
            for name, value in ours.items()
            if name in theirs
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
    """The first gradient that differs, in the step of this number."""

    number: int
    share: float
    """Norm of the difference, relative to that of the gradient of one process."""
    ratio: float
    """By which the gradient of one process must be multiplied to come closest to the other one."""


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


_MEANS = 1e-6  # relative difference of a scalar from the mean of the members'
_RATIO = 1e-3  # how close the ratio of gradients is to 1/n, for a sum
_LARGE = 0.1  # share of a gradient
_LINE = 70  # characters of a quoted line
_NO_MEAN = (
    "It compares samples of the batch with each other, or is a mean over other items than samples; a process sees only "
    "those of its share."
)


def reason_for_gap(
    gap: GradientGap,
    reference: ProcessRecord,
    group: Sequence[ProcessRecord],
    alone: ProcessRecord,
    again: Sequence[ProcessRecord],
) -> Finding:
    """Tell why the gradient of a group is not that of the `reference`, one process.

    `alone` and `again` are the same with the scalars on the way to the loss: the first that is no mean of the members'
    is the cause.
    """
    step = reference.steps[gap.number]
    mean = sum(record.steps[gap.number].loss * record.steps[gap.number].weight for record in group)
    culprit = first_culprit(alone, list(again), gap.number, _MEANS)
    if step.graph.checkpoint and abs(mean - step.loss) <= _MEANS * max(1.0, abs(step.loss)):
        return _checkpoint(step, gap, len(group))
    if step.graph.weighted:
        return _weighted(step, gap, len(group))
    if abs(gap.ratio - 1 / len(group)) < _RATIO or (step.graph.sums and gap.share > _LARGE):
        return _sum(step.line if culprit is None else culprit[0].where)
    if culprit is not None:
        return _whole_batch(*culprit, len(group))
    return Finding(
        "loss",
        f"{short_place(step.line)}: the gradient of {len(group)} processes differs by {percent(gap.share)} from that "
        f"of one, in step {gap.number + 1}.",
        where=step.line,
        details=_quoted(step.line),
    )


def _checkpoint(step: RecordedStep, gap: GradientGap, size: int) -> Finding:
    return Finding(
        "loss",
        f"{short_place(step.line)}: the loss of {size} processes is that of one, but their gradient differs by "
        f"{percent(gap.share)}: a module is used more than once under torch.utils.checkpoint(use_reentrant=True).",
        where=step.line,
        mend="use_reentrant=False",
    )


def _weighted(step: RecordedStep, gap: GradientGap, size: int) -> Finding:
    return Finding(
        "loss",
        f"{short_place(step.line)}: the gradient of {size} processes differs by {percent(gap.share)} from that of one: "
        "cross_entropy(weight=…) is a mean over weights, not over samples.",
        where=step.line,
        details=_quoted(step.line),
        mend="session.step(loss, items=weight[y].sum())",
    )


def _sum(where: str) -> Finding:
    return Finding(
        "loss",
        f"{short_place(where)}: the loss is a sum over the batch: with n processes its gradient is 1/n of that of one.",
        where=where,
        details=_quoted(where),
        mend='use the mean, or say what it is: session.step(loss, reduction="sum")',
    )


def _whole_batch(scalar: Scalar, mean: float, size: int) -> Finding:
    return Finding(
        "loss",
        f"{short_place(scalar.where)}: {scalar.function} is {scalar.value:.6g} on the batch, but {mean:.6g} as the "
        f"mean of {size} shares: this loss is no mean over samples.",
        scalar.function,
        scalar.where,
        details=(*_quoted(scalar.where), _NO_MEAN),
        mend="over the whole batch: compute it from session.gather(tensor), with session.step(loss, "
        'reduction="batch"); a mean over other items: session.step(loss, items=n)',
    )


def _quoted(where: str) -> tuple[str, ...]:
    line = line_of(where)[:_LINE]
    return (line,) if line else ()
