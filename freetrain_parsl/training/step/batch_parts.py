"""What user code computes from the parts of all members in a batch: `session.all_reduce` and `session.gather`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.training.data.order import Batch, Piece
    from freetrain_parsl.training.step.bypass import BypassCheck

__all__ = ["BatchParts"]


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
