"""Summing the gradients of a group's members.

Two implementations of one interface. `OverlappedSum` sends gradients in buckets while ``backward`` still runs, as
DistributedDataParallel does; but it uses hooks on the parameters instead of wrapping the model, so the user's model
stays the same object in any group and a change of group has no cost here. `OrderedSum` sums the shards of a batch one
by one in a fixed order, so the result has the same bits for any number of members.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from freetrain_parsl.training.step.gradient_noise import dense_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from freetrain_parsl.training.data.order import Piece
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.replica_groups import Pending
    from freetrain_parsl.training.step.gradient_noise import NoiseMeter

_BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel
_BLOCK = 4 << 20  # elements gathered at a time


class GradientSum(Protocol):
    """Sets ``.grad`` of all parameters to the sum over all shards of a batch, on all members."""

    sends_early: bool
    """Whether gradients may be sent while ``backward`` runs; not if it contains sums of the user's code."""

    def before_backward(self, group: Group, piece: Piece) -> None:
        """Prepare for the gradients of a piece."""

    def after_backward(self, group: Group, piece: Piece) -> None:
        """Take the gradients of a piece."""

    def complete(self, group: Group, shards: int) -> None:
        """Wait, after the last piece, until ``.grad`` contains the sums; raises PeerFailed if a member has failed."""

    def cancel(self) -> None:
        """Discard the gradients of an interrupted batch."""


class _Bucket:
    """Gradients that are sent together: one flat tensor, with a flag for each parameter that has a gradient.

    With a `noise` meter, it also contains a term of the measurement.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], noise: NoiseMeter | None) -> None:
        self._noise = noise
        self.parameters = parameters
        self.missing: set[torch.Tensor] = set()
        self.work: Pending | None = None
        first = parameters[0]
        size = sum(parameter.numel() for parameter in parameters)
        sizes = [*(parameter.numel() for parameter in parameters), len(parameters), 0 if noise is None else 1]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.gradients = self.flat[:size]
        *self.views, self.used, self.noise_term = torch.split(self.flat, sizes)

    def send(self, group: Group) -> None:
        self.fill()
        self.work = group.begin_sum(self.flat)

    def fill(self) -> None:
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            gradient = dense_gradient(parameter)
            self.used[index] = 0.0 if gradient is None else 1.0
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.reshape(-1))
        if self._noise is not None:
            self.noise_term.zero_()
            if self._noise.measures_shards:
                self.noise_term += self._noise.shard_term(self.gradients)

    def unpack(self) -> None:
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.grad is not None:
                parameter.grad.copy_(view.view_as(parameter))
            elif self.used[index] > 0:  # on another member
                parameter.grad = view.view_as(parameter).clone()


class OverlappedSum:
    """Sums in buckets, which are sent while the ``backward`` of the last piece runs, as soon as they are full.

    A parameter that is used more than once may get its gradient in several parts: with reentrant activation
    checkpointing, autograd does not know of the parts to come, so no hook can tell which one is the last. Therefore the
    last bucket is sent after ``backward``, and with it the number of members on which a gradient has changed since it
    was sent. If there are any, all members send all buckets again, and from then on after ``backward``. Whether a
    member sends early changes neither the order nor the sizes of the sums: a newcomer may do so while others do not.

    Parameters
    ----------
    parameters
        All parameters that may get a gradient.
    noise
        Measures the gradient's noise between the members; ``None``: it is not measured.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], noise: NoiseMeter | None = None) -> None:
        self.sends_early = True
        self._parameters = list(parameters)
        self._noise = noise
        self._layout: tuple[bool, ...] = ()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.Tensor, _Bucket] = {}
        self._hooked: set[nn.Parameter] = set()
        self._group: Group | None = None
        self._launched = 0
        self._late = False  # whether a gradient has changed since it was sent
        self._changes_late = False  # whether one ever has

    def before_backward(self, group: Group, piece: Piece) -> None:
        """See `GradientSum`."""
        if group.size == 1 or not piece.last:
            return
        layout = tuple(parameter.requires_grad for parameter in self._parameters)
        if layout != self._layout:
            self._lay_out(layout)
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(bucket.parameters), None
        self._launched, self._late = 0, False
        self._group = group

    def after_backward(self, group: Group, piece: Piece) -> None:
        """See `GradientSum`: done by the hooks."""

    def complete(self, group: Group, shards: int) -> None:  # noqa: ARG002 - not needed for the sum
        """See `GradientSum`."""
        if group.size == 1:
            return
        self._launch(upto=len(self._buckets))
        self._group = None
        if len(self._buckets) > 1:  # on the CPU: to read a number from a GPU would be to wait for it
            late = torch.tensor([float(self._late)])
            group.end_sums([group.begin_sum(late)])
            if late.item():
                self._changes_late = True
                group.end_sums(self._works(self._buckets))
                for bucket in self._buckets:  # no sum has been unpacked: ``.grad`` is still this member's
                    bucket.send(group)
        for bucket in self._buckets:
            group.end_sums(self._works([bucket]))
            bucket.unpack()
        if self._noise is not None and self._noise.measures_shards:
            self._noise.add_shards([b.noise_term for b in self._buckets], [b.gradients for b in self._buckets])

    def cancel(self) -> None:
        """See `GradientSum`."""
        self._group = None
        for bucket in self._buckets:
            bucket.work = None

    def _lay_out(self, layout: tuple[bool, ...]) -> None:
        """Assign the parameters to buckets, last ones first: the order in which ``backward`` reaches them."""
        self._layout = layout
        runs: list[list[nn.Parameter]] = []
        room = 0
        for parameter in reversed(self._parameters):
            if not parameter.requires_grad:
                continue
            size = parameter.numel() * parameter.element_size()
            alike = runs and (runs[-1][0].dtype, runs[-1][0].device) == (parameter.dtype, parameter.device)
            if not alike or size > room:
                runs.append([])
                room = _BUCKET_BYTES
            runs[-1].append(parameter)
            room -= size
            if parameter not in self._hooked:
                self._hooked.add(parameter)
                parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]  # torch's
        self._buckets = [_Bucket(run, self._noise) for run in runs]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._group is None or parameter not in self._bucket_of:
            return
        bucket = self._bucket_of[parameter]
        self._late |= bucket.work is not None
        bucket.missing.discard(parameter)
        if not self.sends_early or self._changes_late:
            return
        # In the order of the buckets on all members, whatever the order of the gradients.
        ready = self._launched
        while ready < len(self._buckets) - 1 and not self._buckets[ready].missing:
            ready += 1
        self._launch(upto=ready)

    def _launch(self, upto: int) -> None:
        assert self._group is not None, "between before_backward and complete"
        for bucket in self._buckets[self._launched : upto]:
            bucket.send(self._group)
            self._launched += 1

    @staticmethod
    def _works(buckets: Iterable[_Bucket]) -> list[Pending]:
        return [bucket.work for bucket in buckets if bucket.work is not None]


class OrderedSum:
    """Sums shard by shard, in the order of the shards, whichever member had them.

    The members gather all shards, so each step sends the gradients once per shard: the cost of bitwise equal results.

    Parameters
    ----------
    parameters
        All parameters that may get a gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.sends_early = False
        self._parameters = list(parameters)
        self._rows: list[torch.Tensor] = []

    def before_backward(self, group: Group, piece: Piece) -> None:
        """See `GradientSum`."""

    def after_backward(self, group: Group, piece: Piece) -> None:
        """See `GradientSum`."""
        if not piece.last_of_shard:
            return
        if piece.weight:
            row = self._take()
            if group.size == 1 and self._rows:
                self._rows[0] += row
            else:
                self._rows.append(row)
        else:
            self._take()

    def complete(self, group: Group, shards: int) -> None:
        """See `GradientSum`."""
        rows, self._rows = self._rows, []
        total = rows[0] if group.size == 1 else fold(group, rows, shards, self._empty())
        *parts, used = self._cut(total)
        for parameter, part, mark in zip(self._parameters, parts, used, strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype) if mark > 0 else None

    def cancel(self) -> None:
        """See `GradientSum`."""
        self._rows = []

    def _take(self) -> torch.Tensor:
        """Remove the gradients from the parameters; return one flat tensor, with a flag for each existing gradient."""
        row = self._empty()
        *parts, used = self._cut(row)
        for index, (parameter, part) in enumerate(zip(self._parameters, parts, strict=True)):
            gradient = dense_gradient(parameter)
            if gradient is not None:
                part.copy_(gradient.reshape(-1))
                used[index] = 1.0
                parameter.grad = None
        return row

    def _cut(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parts of a row: a gradient for each parameter, and the flags."""
        return torch.split(row, [*(parameter.numel() for parameter in self._parameters), len(self._parameters)])

    def _empty(self) -> torch.Tensor:
        # One dtype for all: gradients of lower precision are exact in it.
        size = sum(parameter.numel() for parameter in self._parameters) + len(self._parameters)
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._parameters) else torch.float32
        return torch.zeros(size, dtype=dtype, device=self._parameters[0].device)


def fold(group: Group, rows: Sequence[torch.Tensor], shards: int, empty: torch.Tensor) -> torch.Tensor:
    """Sum the rows of all members, one after the other in the order of the shards.

    Parameters
    ----------
    group
        All members call this.
    rows
        This member's rows, one per shard, in order; the shards of a member are consecutive, as from `Order.batch`.
    shards
        Total number of shards.
    empty
        A row of zeros, for members with fewer shards; overwritten with the result.

    Raises
    ------
    PeerFailed
        A member has failed.
    """
    most = -(-shards // group.size)
    base, extra = divmod(shards, group.size)
    counts = [base + (rank < extra) for rank in range(group.size)]
    padding = [torch.zeros_like(empty)] * (most - len(rows))
    mine = torch.stack([*rows, *padding])
    for begin in range(0, empty.numel(), _BLOCK):
        block = mine[:, begin : begin + _BLOCK].contiguous()
        parts = [part[row] for part, count in zip(group.gather(block), counts, strict=True) for row in range(count)]
        total = empty[begin : begin + _BLOCK]
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
    return empty
