"""The session's verbs for exchange between the processes of a training job."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

import torch

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.exchange.shared_results import (
    Link,
    check_plain,
    own_part,
    rows_of_all,
    stand_in,
    total,
)

if TYPE_CHECKING:
    from freetrain_parsl.training.runtime import Runtime

__all__ = ["ExchangeVerbs"]

T = TypeVar("T")


class ExchangeVerbs:
    """A part of `TrainingSession`."""

    _runtime: Runtime

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, the same on each; `tensor` is not changed.

        In the loop over the batches it can be part of a loss: gradients reach the parts of all processes. A process
        whose share of a batch is empty contributes zeros there.

        All processes call it, in the loop over the batches or after this loop, as for a validation that they divide::

            for epoch in session.epochs(10):
                for x, y in data:
                    session.step(cross_entropy(model(x), y))
                mine = torch.tensor(count_hits(model, validation[session.rank :: session.world_size]))
                session.log(accuracy=session.all_reduce(mine) / len(validation))

        If a process fails meanwhile, its part is lost: before the step of a batch, the batch is repeated; otherwise the
        training job resumes from its last checkpoint.

        Parameters
        ----------
        tensor
            Of the same shape and type on all processes; a sum of a bool tensor is one of int64.

        Raises
        ------
        UsageError
            It is no tensor, or the call is where a process that joins later would be alone with it.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"session.all_reduce needs a tensor, got {type(tensor).__name__}: session.all_reduce(torch.tensor(…))"
            )
        part = self._own_part(tensor.long() if tensor.dtype == torch.bool else tensor, rows=False)
        result = self._runtime.together(lambda group: total(group, part), name="all_reduce", of_parts=True)
        result = result.to(tensor.device, copy=True)
        link = self._link(part, gathers=False)
        return result if link is None else link.sum(part, result)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all processes, concatenated along their first dimension in the order of the batch.

        For losses over the whole batch, such as contrastive ones: gradients reach the parts of all processes, and the
        gradient of the loss is that of one process with the whole batch::

            one, other = session.gather(model(x)), session.gather(model(augmented(x)))
            session.step(nt_xent(one, other), reduction="batch")

        All processes call it, where they may call `all_reduce`, but not in a loss with ``micro_batch`` or
        ``deterministic=True``.

        Parameters
        ----------
        tensor
            Shape (samples, ...); only the first dimension may differ between processes. If this process's share of a
            batch is empty, nothing of it is used.

        Returns
        -------
        gathered
            Shape (samples of the whole batch, ...), the same on all processes.

        Raises
        ------
        UsageError
            It is no tensor or has no dimension, or see `all_reduce`.
        """
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"session.gather needs a tensor of shape (samples, …), got {type(tensor).__name__}")
        if not tensor.dim():
            raise UsageError("session.gather needs a tensor of shape (samples, …), got one without dimensions")
        part = self._own_part(tensor, rows=True)
        result = self._runtime.together(lambda group: rows_of_all(group, part), name="gather", of_parts=True)
        assert self._runtime.batch_runner is not None, "checked by together"
        rows = self._runtime.batch_runner.expected_rows(tensor.shape[0], sum(result["rows"]))
        if rows is not None:
            return stand_in(tensor, rows)
        gathered = result["tensor"].to(tensor.device, copy=True)
        link = self._link(part, gathers=True)
        return gathered if link is None else link.concatenation(part, gathered, result["rows"])

    def _link(self, part: torch.Tensor, *, gathers: bool) -> Link | None:
        """Return what passes a result's gradients to all members; ``None`` without gradients or a batch."""
        batch_runner = self._runtime.batch_runner
        if batch_runner is None or not batch_runner.has_piece or not (part.requires_grad and torch.is_grad_enabled()):
            return None
        return Link(self._runtime.members.group, batch_runner.link(gathers=gathers))

    def _own_part(self, tensor: torch.Tensor, *, rows: bool) -> torch.Tensor:
        batch_runner = self._runtime.batch_runner
        return own_part(tensor, counts=batch_runner is None or batch_runner.has_samples, rows=rows)

    def broadcast(self, value: T) -> T:
        """Return the first process's value, on all processes, so that they decide alike.

        All processes call it, in the loop over the batches or after this loop: ``if session.broadcast(is_late()):
        break``.

        Parameters
        ----------
        value
            A number, string or ``None``, or lists, tuples and dictionaries of these.

        Raises
        ------
        UsageError
            It contains something else, or the call is where a process that joins later would be alone with it.
        """
        check_plain(value)
        result = self._runtime.together(lambda group: group.agree_on(value), name="broadcast", of_parts=False)
        return copy.deepcopy(result)  # type: ignore[no-any-return]
