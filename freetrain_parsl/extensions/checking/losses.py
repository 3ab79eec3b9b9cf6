"""Why the gradient of several processes is not that of one: what the loss is a mean over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.extensions.checking.comparisons import first_culprit
from freetrain_parsl.extensions.checking.report import Finding, percent, short_place
from freetrain_parsl.extensions.checking.sources import line_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from freetrain_parsl.extensions.checking.comparisons import GradientGap
    from freetrain_parsl.extensions.checking.records import ProcessRecord, RecordedStep, Scalar

__all__ = ["reason_for_gap"]

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
    """Tell why the gradient of a group is not that of one process.

    Parameters
    ----------
    gap
        The difference.
    reference, group
        One process, and the group.
    alone, again
        The same, with the scalars on the way to the loss: the first that is no mean of the members' is the cause.
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
