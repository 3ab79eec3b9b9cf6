"""Results of collective operations of user code, the same on all members, and the gradients through them.

Every member has the same result and computes a loss from it. Its gradient with respect to one member's part is the sum,
over the members, of the gradients of their losses. The weights of these losses sum to 1, so a loss that is the same on
all members has the gradient that it would have in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from freetrain_parsl.errors import PeerFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from freetrain_parsl.training.data.order import Batch, Piece
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.step.bypass import BypassCheck

__all__ = [
    "BatchParts",
    "Link",
    "Shared",
    "SharedResults",
    "check_plain",
    "own_part",
    "rows_of_all",
    "stand_in",
    "total",
]

_MOST_DIMENSIONS = 8


class SharedResults:
    """The number of operations so far, and the latest result.

    A failure may reach some members before and others after the end of an operation. Those that have the result are
    ahead, as those with another step are, and send it to the others with their state.
    """

    def __init__(self) -> None:
        self.number = 0
        self.latest: Any = None

    def add(self, result: Any) -> None:
        """Note the result of an operation."""
        self.number += 1
        self.latest = result

    def state(self) -> dict[str, Any]:
        """Return the results as plain values and tensors."""
        return {"number": self.number, "latest": self.latest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self.number, self.latest = int(state["number"]), state["latest"]


def total(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the members, on its own device, in new memory."""
    values = tensor.detach().to("cpu", copy=True)
    return group.sum(values).to(tensor.device)


def check_plain(value: Any) -> None:
    """Raise UsageError unless a value is made of numbers, strings, lists, tuples and dictionaries."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for each in value:
            check_plain(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            check_plain(name)
            check_plain(each)
    else:
        raise UsageError(
            f"session.broadcast takes numbers, strings, None, and lists, tuples and dictionaries of these, "
            f"got {type(value).__name__}"
        )


class Link:
    """Leads the gradients of a result back to the parts of all members.

    Parameters
    ----------
    group
        The members.
    check
        Called before gradients are summed; returns whether the members still work on the same batch, and raises
        UsageError if the result cannot be part of a loss.
    """

    def __init__(self, group: Group, check: Callable[[], bool]) -> None:
        self._group = group
        self._check = check

    def sum(self, part: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """Return the sum of all parts, whose value is `result`, as a function of this member's `part`."""
        linked: torch.Tensor = Shared.apply(part, result, self, None)  # type: ignore[no-untyped-call]  # torch's
        return linked

    def concatenation(self, part: torch.Tensor, result: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the concatenation of all parts, whose value is `result`, with these numbers of rows by rank."""
        begin = sum(rows[: self._group.rank])
        own = slice(begin, begin + part.shape[0])
        linked: torch.Tensor = Shared.apply(part, result, self, own)  # type: ignore[no-untyped-call]  # torch's
        return linked

    def total(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of the members' gradients; of an interrupted batch, its own. Raises as `check` does."""
        if not self._check():
            return gradient
        try:
            return total(self._group, gradient)
        except PeerFailed as error:
            if not self._group.note_failure(error):
                raise
            return gradient  # the pass continues, as the replica's own collectives do; then the step is dropped


class Shared(torch.autograd.Function):
    """A value that the members have computed together: node ``SharedBackward`` of a graph, with its `elements`."""

    @staticmethod
    def forward(ctx: Any, _part: torch.Tensor, result: torch.Tensor, link: Link, own: slice | None) -> torch.Tensor:
        """Return the value."""
        ctx.link, ctx.own, ctx.elements = link, own, result.numel()
        return result.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of this member's part."""
        total = ctx.link.total(gradients[0])
        return total if ctx.own is None else total[ctx.own], None, None, None


def own_part(tensor: torch.Tensor, *, counts: bool, rows: bool) -> torch.Tensor:
    """Return what a member contributes: nothing if it only repeats a sample of another one, as its share is empty.

    Parameters
    ----------
    tensor
        What it has computed.
    counts
        Whether its share has samples.
    rows
        Whether the parts are concatenated, and not summed.
    """
    if counts:
        return tensor
    if rows:
        return tensor[:0]
    return torch.where(torch.zeros((), dtype=torch.bool, device=tensor.device), tensor, torch.zeros_like(tensor))


def rows_of_all(group: Group, tensor: torch.Tensor) -> dict[str, Any]:
    """Concatenate the members' tensors along the first dimension, by rank.

    Returns
    -------
    gathered
        ``tensor``: the concatenation, in new memory, without a graph; ``rows``: the number of rows of each member.

    Raises
    ------
    PeerFailed
        A member has failed.
    UsageError
        The tensors differ in more than their number of rows.
    """
    tensor = tensor.detach()
    shape = torch.zeros(_MOST_DIMENSIONS + 1, dtype=torch.int64)
    shape[: tensor.dim()] = torch.tensor(tensor.shape)
    shape[-1] = tensor.dim()
    shapes = torch.stack(group.gather(shape)).tolist()
    if any(each[1:] != shapes[0][1:] for each in shapes):
        known = [tuple(each[: each[-1]]) for each in shapes]
        raise UsageError(f"session.gather: tensors may differ in their first dimension only, got {known}")
    rows = [each[0] for each in shapes]
    # Members have about as many rows: the padding is not more than one sample's.
    padded = tensor.new_zeros((max(rows), *tensor.shape[1:]), dtype=torch.uint8 if tensor.dtype == torch.bool else None)
    padded[: tensor.shape[0]] = tensor
    parts = [part[:number] for part, number in zip(group.gather(padded), rows, strict=True)]
    return {"tensor": torch.cat(parts).to(tensor.dtype), "rows": rows}


def stand_in(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return something like the concatenation of all tensors, for code that has yet to run to the end of a batch.

    A member has failed, and the batch will be repeated: only the number of rows matters.
    """
    if not tensor.shape[0]:
        return tensor.new_zeros((rows, *tensor.shape[1:]))
    return tensor[torch.arange(rows, device=tensor.device) % tensor.shape[0]]


class BatchParts:
    """The sums and concatenations of one batch."""

    def __init__(self) -> None:
        self.are_gathered = False
        """Whether tensors with gradients were gathered, so that the loss may be one of the whole batch."""
        self.is_interrupted = False
        """Whether the batch will be repeated."""
        self._rows: dict[int, int] = {}  # gathered: of this member -> of all

    def expected_rows(self, rows: int, total: int, piece: Piece, batch: Batch) -> int | None:
        """Note how many rows were gathered.

        Parameters
        ----------
        rows, total
            Those of this member, and those of all.
        piece, batch
            Of which samples.

        Returns
        -------
        expected
            After an interruption: how many rows code that runs to the end of the batch expects, as some of its tensors
            were gathered before. Otherwise ``None``.
        """
        if not self.is_interrupted:
            self._rows[rows] = total
            return None
        each, rest = divmod(rows, len(piece.positions))
        return self._rows.get(rows, rows if rest else each * batch.samples)

    def link(
        self, bypass: BypassCheck, *, gathers: bool, one_piece: bool, is_current: Callable[[], bool]
    ) -> Callable[[], bool]:
        """Let the backward pass of this batch contain a sum.

        Parameters
        ----------
        bypass
            Knows whether the session computes gradients.
        gathers
            Whether it is the gradient of a concatenation.
        one_piece
            Whether each member has its part of the batch in one piece.
        is_current
            Returns whether the batch is the current one.

        Returns
        -------
        check
            See `Link`.
        """
        self.are_gathered |= gathers

        def check() -> bool:
            if not one_piece:
                raise UsageError(
                    "session.all_reduce and session.gather cannot be part of a loss with micro_batch or "
                    "deterministic=True, "
                    "where no process has the whole batch at a time; for a value that is only read, use "
                    "session.all_reduce(tensor.detach())"
                )
            if not bypass.is_in_session:
                raise UsageError(
                    "torch.autograd.grad or backward was called on a result of session.all_reduce or "
                    "session.gather: outside "
                    "session.step and session.backward, the values of all processes would be added"
                )
            if not is_current():
                raise UsageError(
                    "a result of session.all_reduce or session.gather can be part of a loss of its batch only"
                )
            return not self.is_interrupted

        return check
