"""Training on one batch: gradients of its pieces, their sum over the members, optimizer steps."""

from __future__ import annotations

import math
import os
from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from freetrain_parsl.errors import PeerFailed, UsageError
from freetrain_parsl.training.exchange.shared_results import BatchParts
from freetrain_parsl.training.metrics import Tally
from freetrain_parsl.training.preparation import check_added, parameters_of
from freetrain_parsl.training.step.buffers import RunningStatistics
from freetrain_parsl.training.step.closure import Kept, needs_closure, usage
from freetrain_parsl.training.step.gradients import GradientSum, OrderedSum, OverlappedSum
from freetrain_parsl.training.step.loss_kind import LossReader, Weighing, check_weighing
from freetrain_parsl.training.step.once_per_step import Hyperparameters, guard, once_a_step
from freetrain_parsl.training.step.own_gradients import OwnGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from freetrain_parsl.training.data.order import Batch, Piece
    from freetrain_parsl.training.extension import SessionExtension
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.replica_groups import Pending
    from freetrain_parsl.training.step.bypass import BypassCheck
    from freetrain_parsl.training.step.gradient_noise import NoiseMeter
    from freetrain_parsl.training.step.learning_rate import RateScaling
    from freetrain_parsl.training.step.loss_kind import Reduction


class BatchRunner:
    """Trains a model batch by batch, together with the other members of the group.

    Parameters
    ----------
    model
        The network.
    objects
        All arguments of `session.prepare`: optimizers, a gradient scaler and further models are found among them.
    bypass
        Told of what the session itself does with the parameters.
    extension
        May compute the gradients and make the steps, or average the gradients of some parameters.
    """

    def __init__(
        self, model: nn.Module, objects: Sequence[object], bypass: BypassCheck, extension: SessionExtension
    ) -> None:
        self.batch: Batch
        self.tally: Tally
        self.cut_off = False
        """Whether a member failed during the current batch."""
        self.is_left = False
        """Whether user code has left the loop over the batches in this one, so that what follows is not repeated."""
        self.one_step = False
        """Whether a batch may be divided into pieces, so that it can have only one step."""
        self.in_closure = False
        """Whether a closure of the user is evaluated in the step of an optimizer."""
        self._stepped: Tally | None = None  # that of the last batch with a step
        modules = dict.fromkeys([model, *(thing for thing in objects if isinstance(thing, nn.Module))])
        self._models = nn.ModuleList(module for module in modules if not isinstance(module, AveragedModel))
        self._optimizers = [thing for thing in objects if isinstance(thing, Optimizer)]
        self._scaler = next((thing for thing in objects if isinstance(thing, torch.amp.GradScaler)), None)
        self._bypass, self._extension = bypass, extension
        self.parameters = parameters_of([self._models, *self._optimizers])
        """The parameters of the models, then those only in an optimizer; each once."""
        self._counted = self._count_parameters()
        bypass.watch(self.parameters)
        self._spread = {parameter for parameter in self.parameters if extension.spread(parameter)}
        self._gradients = OwnGradients(self.parameters, self._spread)
        self._sum: GradientSum = OverlappedSum(self._gradients.summed)
        self._noise: NoiseMeter | None = None
        self._statistics = RunningStatistics(nn.ModuleList(modules), self._models, by_share=False)
        self._group: Group
        self.piece: Piece | None = None
        """The piece that the user's code trains on."""
        self.pieces_begun = 0
        """How many pieces of the current batch it has got."""
        self._pieces_passed = 0  # those whose gradients have been computed
        self._has_gradients = False
        self._complete = False
        self._calls = 0
        self._done = 0
        self._calls_after_cut = 0
        self._made = 0.0  # steps of the batch, also by other members while this one was interrupted
        # How often an object has done what is done once a step, after how many steps: in all attempts at this batch,
        # and in this one.
        self._acted: Counter[tuple[object, int]] = Counter()
        self._told: Counter[tuple[object, int]] = Counter()
        self._repeats = False  # whether the next batch is this one again
        self._parts = BatchParts()  # of the current batch
        self._hyperparameters: Hyperparameters | None = None  # at its beginning, if it may be interrupted
        self._evaluations = 0  # of a closure, in the current step
        self._reader = LossReader()
        self._weighing = Weighing("mean", None)  # of the current piece
        self._items: list[torch.Tensor | float] = []  # of this member's pieces for the current step so far
        self._step_tally: Tally  # that of the current step of the batch
        self._tally_work: Pending | None = None
        self._was_deterministic: bool | None = None
        self._guarded = [thing for thing in objects if once_a_step(thing)]
        self._releases = [
            guard(thing, method, partial(self._acts, thing)) for thing in self._guarded for method in once_a_step(thing)
        ]

    def close(self) -> None:
        """Leave the classes of the user's objects, and torch's settings, as they were."""
        for release in self._releases:
            release()
        if self._was_deterministic is not None:
            torch.use_deterministic_algorithms(self._was_deterministic)

    def fix_order(self, device: torch.device) -> None:
        """Sum shard by shard in a fixed order from now on, and use torch's deterministic algorithms until `close`."""
        if device.type == "cuda":  # otherwise torch raises an error for matrix products
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self._was_deterministic = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(mode=True)
        self._sum = OrderedSum([parameter for parameter in self.parameters if parameter.requires_grad])
        self._statistics = RunningStatistics(self._models, self._models, by_share=True)

    def measure_noise(self, meter: NoiseMeter) -> None:
        """Measure the noise of the gradient from now on."""
        self._noise = meter
        self._sum = OverlappedSum(self._gradients.summed, meter)

    @property
    def batch_loss(self) -> torch.Tensor | float | None:
        """Mean loss over the last batch with a step, a scalar, the same on all members; ``None`` before.

        In an interrupted batch it is that of the batch before, or NaN.

        Raises
        ------
        PeerFailed
            Others have made the step in which this member was interrupted: it does not know the loss.
        """
        if self.cut_off and not self._repeats:
            raise PeerFailed("this process has no loss of the last step, in which another one failed")
        if self.cut_off and self._stepped is None:
            return math.nan
        return None if self._stepped is None else self._stepped.mean

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of the current batch are complete, so that a step can be made."""
        return self._has_gradients and self._complete and not self.cut_off and self._calls >= self._done

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been made on the current batch."""
        return self._calls > 0 or self._done > 0

    @property
    def acts_once(self) -> bool:
        """Whether something is prepared that acts once a step, such as a scheduler."""
        return bool(self._releases)

    @property
    def can_be_undone(self) -> bool:
        """Whether what user code has done before an interruption can be undone, or is not repeated with the batch."""
        if not self.has_stepped:
            return not self._told  # an optimizer's rate can be put back, and not what its scheduler knows
        return bool(self._told) or self._hyperparameters is None or not self._hyperparameters.have_changed

    @property
    def may_still_act(self) -> bool:
        """Whether such an object may have to act for the last step yet, or a scaler has acted for the next one."""
        waits = any((thing, self._calls) not in self._told for thing in self._guarded if thing is not self._scaler)
        return (self.has_stepped and waits) or (self._scaler, self._calls) in self._told

    @property
    def averages_statistics(self) -> bool:
        """Whether the model has running statistics of which each member has its own until they are averaged."""
        return self._statistics.differ

    @property
    def has_piece(self) -> bool:
        """Whether the user's code has a current piece."""
        return self.piece is not None

    @property
    def has_pieces(self) -> bool:
        """Whether it has the gradients of some pieces of a batch, and not of all."""
        return self._gradients.are_hidden

    @property
    def has_samples(self) -> bool:
        """Whether what the user's code computes now is of samples that count: see `Piece`."""
        return self.piece is None or self.piece.weight > 0

    def expected_rows(self, rows: int, total: int) -> int | None:
        """See `BatchParts.expected_rows`; ``None`` outside a batch, too."""
        return None if self.piece is None else self._parts.expected_rows(rows, total, self.piece, self.batch)

    def link(self, *, gathers: bool) -> Callable[[], bool]:
        """See `BatchParts.link`."""
        self._sum.sends_early = False  # its sums follow those of the backward pass, on all members
        batch = self.batch
        return self._parts.link(
            self._bypass, gathers=gathers, one_piece=not self.one_step, is_current=lambda: self.batch is batch
        )

    def open_batch(self, group: Group, batch: Batch, device: torch.device, done: int) -> None:
        """Begin a batch, of which `done` steps have been made already.

        Raises
        ------
        UsageError
            An optimizer has a parameter that was made in the loop.
        """
        if self._counted != (count := self._count_parameters()):
            self._counted = count
            check_added(self._optimizers, self.parameters)
        if self._has_gradients or self._gradients.are_hidden:  # of a batch that the loop has left before its step
            self._gradients.forget()
            self._gradients.reset()
            self._sum.cancel()
        self._group, self.batch = group, batch
        self.tally = self._step_tally = Tally(batch, device)
        self._items = []
        self.cut_off = self.is_left = self._complete = False
        if not self._repeats:
            self._acted.clear()
        self._told.clear()
        self._repeats = False
        self.pieces_begun = self._pieces_passed = 0
        self._sum.sends_early = True
        self._parts = BatchParts()
        self._calls, self._calls_after_cut, self._done = 0, 0, done
        self._hyperparameters = None if group.size == 1 else Hyperparameters(self._optimizers)
        if self._noise is not None:
            self._noise.open_batch(batch, 1.0 if self._scaler is None else self._scaler.get_scale())
        self._statistics.open_batch(group)

    def hand_out(self, piece: Piece) -> None:
        """Note the piece that the user's code trains on next."""
        self.piece, self._has_gradients = piece, False
        self.pieces_begun += 1
        self._statistics.open_piece(piece)
        self._bypass.begin_batch()

    def take_back(self) -> None:
        """Note that the user's code is done with a piece, with or without a step.

        Raises
        ------
        UsageError
            It was trained on with a plain ``loss.backward()``, or its gradients were computed and not used.
        """
        self.piece = None
        self._pass_made_step()
        if self._has_gradients and self._complete and not self.cut_off and self._gradients.any():
            raise UsageError(
                "session.backward() was called for a batch, and session.step() was not: its gradients would be lost. "
                "To accumulate gradients over several batches, use session.loader(batch_size=…, micro_batch=…), whose "
                "batch_size is that of a step; to skip a batch, call optimizer.zero_grad()"
            )
        self._bypass.end_batch()

    def leave_batch(self) -> None:
        """Note that the user's loop over this batch has ended, perhaps early."""
        self.piece = None
        self.cut_off = False

    def backward(
        self,
        loss: torch.Tensor,
        items: torch.Tensor | float | None = None,
        reduction: Reduction | None = None,
        *,
        steps: bool = False,
    ) -> None:
        """Add the gradients of a piece to the gradients of the batch.

        Parameters
        ----------
        loss
            Mean over the piece's samples, or over `items`; a scalar.
        items
            How many items, such as tokens, the loss is a mean over; ``None``: its samples.
        reduction
            What the loss is otherwise; ``None``: its graph tells.
        steps
            Whether `step` follows at once.

        Raises
        ------
        PeerFailed
            A member has failed.
        """
        weighed = self._begin_backward(loss, items, reduction)
        if weighed is None:
            return
        with self._bypass.acting(session=True):
            if self._extension.computes:
                self._extension.backward(weighed, steps=steps and not self.one_step)  # else a part of the batch follows
            else:
                weighed.backward()  # type: ignore[no-untyped-call]  # torch's own
        self._end_backward()

    def _begin_backward(
        self, loss: torch.Tensor, items: torch.Tensor | float | None, reduction: Reduction | None
    ) -> torch.Tensor | None:
        """Begin `backward`: return the loss with its weight in the batch; ``None`` if the batch is interrupted."""
        self._bypass.before_backward()
        if self.cut_off:
            return None
        piece = self.piece
        assert piece is not None, "checked by the runtime"
        if self.in_closure:
            raise UsageError(f"session.backward() was called in a closure: {usage(self._optimizers[0])}")
        self._pass_made_step()
        if self._has_gradients:
            raise UsageError("session.backward() can be called once with each step; sum several losses before it")
        if self._calls and self.one_step:
            raise UsageError("several steps in a batch cannot be combined with micro_batch or deterministic=True")
        if self.one_step and self._pieces_passed < self.pieces_begun - 1:
            raise UsageError(
                "session.step() was called for a micro-batch, and not for an earlier one of the same batch; to skip a "
                "batch, skip all its micro-batches, on all processes"
            )
        self._weighing = self._reader.weighing(
            loss,
            items,
            reduction,
            samples=len(piece.positions),
            batch=self.batch.samples,
            step=self._calls,
            gathered=self._parts.are_gathered,
        )
        check_weighing(self._weighing, one_piece=not self.one_step, measured=self._noise is not None)
        items = self._weighing.items
        self._has_gradients, self._complete = True, False
        self._tally_work = self._tell(loss, piece, items)
        if self._noise is not None and self._noise.measures_shards and items is not None:
            self._noise.share = float(sum(self._items)) / self.batch.samples
        if not self._measures_pieces:
            self._gradients.show()
        self._sum.before_backward(self._group, piece)
        weight = self._weight(piece, items)
        if items == 0 and not isinstance(items, torch.Tensor) and not torch.isfinite(loss):
            loss = self._without_items(loss)
        weighed = loss if isinstance(weight, float) and weight == 1.0 else loss * weight
        return weighed if self._scaler is None else self._scaler.scale(weighed)

    def _without_items(self, loss: torch.Tensor) -> torch.Tensor:
        """Return, instead of a loss that is 0/0 as this piece has no items, a loss without gradients."""
        if self._extension.computes or self._spread:
            raise UsageError(
                "session.step: this part of the batch has no items, and a loss that is not finite, so that all "
                "gradients would be NaN: divide by at least one, such as mask.sum().clamp(min=1)"
            )
        return torch.zeros_like(loss).requires_grad_()

    def _end_backward(self) -> None:
        """End `backward`, once the gradients of the piece are there."""
        piece = self.piece
        assert piece is not None, "since _begin_backward"
        if self._noise is not None and self._measures_pieces:
            weighs_items = self._weighing.items is not None
            self._noise.add_piece(self._gradients.summed, float(self._items[-1]) if weighs_items else piece.weight)
            self._gradients.add_hidden()
        self._sum.after_backward(self._group, piece)
        self._pieces_passed += 1
        self._statistics.close_piece(piece)
        if not piece.last:
            self._gradients.hide()
            return
        if self._tally_work is not None:
            self._group.end_sums([self._tally_work])
        factor = self._factor
        if self._noise is not None:
            self._noise.factor = float(factor)
        self._sum.complete(self._group, self.batch.shards)
        self._gradients.multiply(factor)
        if self._noise is not None and not self._calls:
            if self._group.size == 1:
                self._noise.add_whole(self._gradients.summed)
            self._noise.close_batch()
        self._gradients.divide_summed(self._group.shards)
        self._statistics.complete(self._group, self.batch.shards)
        self._group.confirm()
        self._complete = True

    def step(self, optimizer: Optimizer | None, scaling: RateScaling | None) -> bool:
        """Make the step of one optimizer or of all; return whether it was made."""
        if self.cut_off:
            return self._was_made()
        if not self._has_gradients:
            raise UsageError("session.step() needs a loss: session.step(loss), or session.backward(loss) before it")
        if not self._complete:
            return False
        optimizers = self.chosen(optimizer)
        for each in filter(needs_closure, optimizers):
            raise UsageError(f"session.step() was called with a loss: {usage(each)}")
        self._has_gradients = False
        self._calls += 1
        if self._calls <= self._done:  # made before the batch was interrupted
            self._gradients.reset()
            return False
        with self._bypass.acting(session=True), nullcontext() if scaling is None else scaling.applied(optimizers):
            if self._extension.computes:
                self._extension.step(optimizers)
            elif self._scaler is not None:
                for each in optimizers:
                    self._scaler.step(each)
            else:
                for each in optimizers:
                    each.step()
        self._end_step()
        return True

    @property
    def others_stepped(self) -> bool:
        """Whether the next step was made, as user code has been told in members that had no failure in it."""
        return self.cut_off and self._done <= self._calls + self._calls_after_cut < self._made

    def _was_made(self) -> bool:
        """Return whether it was, and go to the one after it."""
        made = self.others_stepped
        self._calls_after_cut += 1
        return made

    def _pass_made_step(self) -> None:
        """Drop gradients whose step was made before the batch was interrupted, if user code does not ask for it."""
        if self._has_gradients and self._complete and self._calls < self._done:
            self._has_gradients = False
            self._calls += 1
            self._gradients.reset()

    def _end_step(self) -> None:
        self._gradients.reset()
        if self._scaler is not None:
            self._scaler.update()
        if self._calls == 1:
            self._stepped = self.tally

    def chosen(self, optimizer: Optimizer | None) -> Sequence[Optimizer]:
        """Return the optimizers to step: the given one, or all.

        Raises
        ------
        UsageError
            It is not one of them.
        """
        if optimizer is not None and optimizer not in self._optimizers:
            raise UsageError("session.step: that optimizer was not given to session.prepare")
        return self._optimizers if optimizer is None else [optimizer]

    def step_by_closure(
        self, chosen: Optimizer, evaluate: Callable[[], torch.Tensor | float], scaling: RateScaling | None
    ) -> bool:
        """Make the step of an optimizer that evaluates the loss itself; return whether it was made.

        Parameters
        ----------
        chosen
            The optimizer.
        evaluate
            Calls `evaluation` for the user's loss.
        scaling
            As for `step`.

        Raises
        ------
        PeerFailed
            A member has failed; the step is undone.
        """
        if self.cut_off:
            return self._was_made()
        for given, what, why in (
            (self.one_step, "micro_batch or deterministic=True", "each evaluation needs the whole batch at a time"),
            (self._scaler is not None, "a GradScaler", "its scale would change between the evaluations of a step"),
            (self._noise is not None, "batch_range", "the gradient's noise is measured once in a batch"),
            (bool(self._spread), "a sharded model", "its optimizer needs whole parameters"),
        ):
            if given:
                name = type(chosen).__name__
                raise UsageError(f"session.step(closure): {name} cannot be combined with {what}, as {why}")
        if self._calls < self._done:
            self._calls += 1
            return False
        kept = Kept(chosen) if self._group.size > 1 else None
        try:
            with nullcontext() if scaling is None else scaling.applied([chosen]), self._bypass.acting(session=True):
                chosen.step(evaluate)  # type: ignore[arg-type]  # LBFGS reads a tensor, too
        except PeerFailed:
            assert kept is not None, "in a group"
            kept.restore()
            raise
        finally:
            self._evaluations, self.in_closure = 0, False
        self._has_gradients = False
        self._calls += 1
        self._end_step()
        return True

    def evaluation(
        self, closure: Callable[[], torch.Tensor], items: torch.Tensor | float | None, reduction: Reduction | None
    ) -> torch.Tensor | float:
        """Compute the gradients of the batch once more in a step; return its loss, the same on all members."""
        self._gradients.reset()
        self._has_gradients = False
        self._evaluations += 1
        self.in_closure, passes = True, self._bypass.passes_in_batch
        with self._bypass.acting(session=False):
            loss = closure()
        if self._bypass.passes_in_batch > passes and self._gradients.any():
            raise UsageError(f"loss.backward() was called in a closure: {usage(self._optimizers[0])}")
        self.in_closure = False
        self.backward(loss, items, reduction)
        mean = self._step_tally.mean
        return mean * self.batch.samples if self._weighing.reduction == "sum" else mean

    def cut(self) -> None:
        """Drop the current batch after a member has failed."""
        self.cut_off = self._parts.is_interrupted = True
        self._gradients.forget()
        self._sum.cancel()
        self._gradients.reset()
        self._statistics.cancel()
        if self.has_stepped:  # they may belong to a step that is not made again
            self._hyperparameters = None
        self._put_back()

    def hold(self, *, made: float, repeats: bool) -> None:
        """Remember hyperparameters and buffers after an interruption, to undo what the rest of the loop's body changes.

        Parameters
        ----------
        made
            How many steps of the batch have been made, by this member or others.
        repeats
            Whether the batch is repeated by this member, which has made these steps.
        """
        self._made, self._repeats = made, repeats
        self._hyperparameters = Hyperparameters(self._optimizers)
        self._statistics.hold()

    def release(self) -> None:
        """Undo what user code has changed since `hold`, when it is done with an interrupted batch."""
        if self.cut_off:
            self._put_back()
            self._statistics.cancel()

    def _put_back(self) -> None:
        if self._hyperparameters is not None:
            self._hyperparameters.put_back()

    def average_statistics(self, group: Group) -> None:
        """Average the model's running statistics over the members; raises PeerFailed if one has failed."""
        self._statistics.average(group)

    def _tell(self, loss: torch.Tensor, piece: Piece, items: torch.Tensor | float | None) -> Pending | None:
        """Add the loss to the tally; with the last piece, start to sum the tally over the members.

        A second step on a batch is not counted, but its items are. Sums count as means over samples.
        """
        if self._calls and items is None and not self._evaluations:
            return None
        if self._calls or self._evaluations > 1:
            self._step_tally, self._items = Tally(self.batch, self.tally.device), []
        is_sum = self._weighing.reduction == "sum" and piece.weight
        self._step_tally.add(loss.detach() / piece.weight if is_sum else loss, piece, items)
        if items is not None:
            self._items.append(items if piece.weight else 0.0)
        return self._group.begin_sum(self._step_tally.values) if piece.last and self._group.size > 1 else None

    def _weight(self, piece: Piece, items: torch.Tensor | float | None) -> torch.Tensor | float:
        """Return the weight of a piece's loss; if it is a mean over items, the gradients are divided afterwards."""
        if self._weighing.reduction == "sum":
            weight: torch.Tensor | float = 1.0 if piece.weight else 0.0
        elif items is None:
            weight = piece.weight / self.batch.samples
        elif self._has_one_mean:
            return 1.0
        else:
            weight = items / self.batch.samples if piece.weight else 0.0
        # FSDP2 averages over the members of a replica; those that are summed are divided afterwards, too.
        return weight * self._group.shards if self._spread else weight

    @property
    def _has_one_mean(self) -> bool:
        """Whether one loss is the mean over the whole batch; it then needs no weight, except for equal bits."""
        return self._group.size == 1 and len(self.batch.pieces) == 1 and self._was_deterministic is None

    @property
    def _factor(self) -> torch.Tensor | float:
        """By which summed gradients are multiplied: the number of items is known only after the last piece."""
        if self._weighing.items is None or self._has_one_mean:
            return 1.0
        items = self._step_tally.items
        if isinstance(items, torch.Tensor) and (self._spread or not items.is_cuda):
            items = items.item()  # sharded gradients cannot be multiplied by a tensor
        if isinstance(items, torch.Tensor):
            return torch.where(items > 0, self.batch.samples / items, 1.0)
        return self.batch.samples / items if items else 1.0

    @property
    def _measures_pieces(self) -> bool:
        """Whether the gradients of each piece are computed apart from the others, to measure their noise."""
        return self._noise is not None and self._group.size == 1 and self._noise.measures_pieces

    def _count_parameters(self) -> int:
        """Return the number of parameters of the optimizers."""
        return sum(len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups)

    def _acts(self, thing: object) -> bool:
        """Return whether an object acts now: with the last piece, and not again in a batch that is repeated."""
        if self.cut_off:
            return False
        if self.piece is None:
            return True
        if not self.piece.last:
            return self.is_left
        key = thing, self._calls
        self._told[key] += 1
        if self._told[key] <= self._acted[key]:
            return False
        self._acted[key] += 1
        return True
