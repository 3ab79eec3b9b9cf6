"""The work of the meetings of an array: fused forward and backward passes, and optimizer steps."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.ambient import MemberStreams
from freetrain_parsl.extensions.fusion.engine.array import Array, MemberObjects
from freetrain_parsl.extensions.fusion.engine.call_graph import CallGraph
from freetrain_parsl.extensions.fusion.engine.calls import (
    ArgumentsDiffer,
    CallsApart,
    ModelCall,
    arguments_of,
    call_of,
    check_stackable,
    difference,
    is_same,
)
from freetrain_parsl.extensions.fusion.engine.intercept import AttributeWatch, original_forward
from freetrain_parsl.extensions.fusion.engine.lockstep import Lockstep, Meeting
from freetrain_parsl.extensions.fusion.engine.memory import forget_peak, is_out_of_memory, used_memory
from freetrain_parsl.extensions.fusion.forward.differences import KeptBySome, compare
from freetrain_parsl.extensions.fusion.forward.forward import Stacked, assign, fused_call
from freetrain_parsl.extensions.fusion.forward.operators import reason_of
from freetrain_parsl.extensions.fusion.forward.outputs import opened, whole
from freetrain_parsl.extensions.fusion.forward.shared_base import ChangesShared, SharedTensor, shared_bytes
from freetrain_parsl.extensions.fusion.forward.verification import verify
from freetrain_parsl.extensions.fusion.messages import FAILED
from freetrain_parsl.extensions.fusion.optimizers.optimizers import (
    OwnOptimizers,
    RowOptimizer,
    check_optimizers,
    check_parameters,
    row_optimizer,
)
from freetrain_parsl.extensions.fusion.slot.shared_batches import SharedBatches, can_be_shared, same_source
from freetrain_parsl.extensions.fusion.slot.sizing import StepTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from freetrain_parsl.extensions.fusion.engine.lockstep import Strand
    from freetrain_parsl.extensions.fusion.engine.per_member import Differing
    from freetrain_parsl.extensions.fusion.slot.sizing import ArraySizing
    from freetrain_parsl.training.extension import DataSource

__all__ = ["UNFUSED", "FusionEngine"]

logger = logging.getLogger(__name__)

UNFUSED: Final = object()
"""Result of a meeting that was not held for all members: the member does the work alone."""

_VERIFIED_CALLS = (0, 4)  # of each kind: at first training jobs with one seed have equal parameters

_ROUNDS_APART = 2  # after which members have what others keep, as a mask

_SMALL_SHARE = 0.2  # of the calls with differing arguments: the last batch of an epoch may be another one

_JOIN, _FORWARD, _BACKWARD, _STEP = range(4)  # order of the meetings


class _Loss(NamedTuple):
    """A participant's loss, for a backward pass or a step; ``None``: its gradients are there."""

    participant: MemberObjects
    loss: torch.Tensor | None


class FusionEngine:
    """Fuses the forward passes, backward passes and steps of the participants that train in the lockstep.

    Parameters
    ----------
    lockstep
        Runs the participants.
    sizing
        Decides whether fusing pays; ``None``: fuse in any case.
    resized
        Called when the sizing has changed the number of members, or decided.
    stepped
        Called between the steps of all participants; may add strands to the lockstep.
    refused
        Called with the reason when the participants cannot be fused, or if that does not pay, and with whether others
        that are alike may be fused.
    shared
        Called with the bytes of the frozen base that all participants have in common, which are in memory once.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        sizing: ArraySizing | None = None,
        resized: Callable[[], None] = lambda: None,
        stepped: Callable[[], None] = lambda: None,
        refused: Callable[[str, bool], None] = lambda _reason, _passing: None,
        shared: Callable[[int], None] = lambda _size: None,
    ) -> None:
        self._sizing = sizing
        self._resized = resized
        self._stepped = stepped
        self._refused = refused
        self._shared = shared
        forget_peak()
        self._own_memory = used_memory()
        self._timer: StepTimer | None = None  # since all participants made a step
        self.reason = ""
        """Why the participants are not fused; empty while they are, or before the first attempt."""
        self.fused_steps = 0
        """Number of steps that were made for all participants at once."""
        self._lockstep = lockstep
        self._participants: list[MemberObjects] = []
        self._members: list[MemberObjects] = []  # of the array, in the order of its rows
        self._array: Array | None = None
        self._optimizers: list[RowOptimizer] = []
        self._differing: list[Differing] = []  # of each model: attributes that differ between the members
        self._calls: Counter[Hashable] = Counter()  # fused calls of each kind
        self._sources: list[tuple[DataSource, SharedBatches]] = []
        self._attributes = AttributeWatch()
        self._graph = CallGraph()
        self._apart = CallsApart()
        self._rounds_apart = 0  # in which a model was called alone, so that it has what those of others keep
        self._open: set[MemberObjects] = set()  # those in a batch with outputs of a fused forward pass
        self._shares = {"share_parameters": True, "share_buffers": True}  # until a model writes to such in its forward

    @property
    def current_strand(self) -> Strand | None:
        """The strand that runs; ``None`` during the work for several."""
        return self._lockstep.current

    @property
    def participants(self) -> int:
        """Number of those that train."""
        return len(self._participants)

    def shared_batches(self, source: DataSource) -> SharedBatches | None:
        """Return the batches of this source, or of one that certainly is the same."""
        if not can_be_shared(source):
            return None
        for known, batches in self._sources:
            if same_source(known, source):
                return batches
        batches = SharedBatches()
        self._sources.append((source, batches))
        return batches

    # ── called by the participants ────────────────────────────────────────────────────────────────

    def join(self, participant: MemberObjects) -> None:
        """Take part from the next step on; wait until all that have begun so far are ready, too."""
        self._participants.append(participant)
        self._timer = None
        self.reason = ""
        if self._takes_turns and self.participants > 1:
            self._shared(self._base())
        self._wait_for_the_others()

    def _wait_for_the_others(self) -> None:
        self._lockstep.meet(Meeting(_JOIN, "join", lambda _strands: None))

    def leave(self, participant: MemberObjects) -> None:
        """Take part no longer; its models and optimizers are ordinary again, after this step of the others."""
        self._timer = None
        self._open.discard(participant)
        self._apart.forget(participant)
        if participant in self._participants:
            self._participants.remove(participant)
            too_slow = self._sizing is not None and self._sizing.decided and not self._sizing.fused
            if len(self._participants) > 1 and not too_slow:
                self.reason = ""  # it may have been the one that differs
        if participant in self._members:
            self._dissolve()

    def end_batch(self, participant: MemberObjects) -> None:
        """Note that a participant computes no more gradients from its outputs so far."""
        self._open.discard(participant)
        if self._members != self._participants or self.reason or not self._pays():
            self._dissolve()  # or optimizers would still step fused

    def forward(
        self, participant: MemberObjects, number: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the output of a participant's model for training, or `UNFUSED`."""
        if self._is_alone():
            return UNFUSED
        call = call_of(participant, number, model, args, kwargs)
        return self._lockstep.meet(Meeting(_FORWARD, call.kind, self._forward, call))

    def backward(self, participant: MemberObjects, loss: torch.Tensor) -> None:
        """Add the gradients of a loss to a participant's ``.grad``."""
        if self._is_alone() and participant not in self._open:
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            return
        self._check_batches()
        self._lockstep.meet(Meeting(_BACKWARD, "backward", self._backward, _Loss(participant, loss)))

    def step(self, participant: MemberObjects, loss: torch.Tensor | None, numbers: tuple[int, ...]) -> None:
        """Compute the gradients of a loss, if given, and step some of a participant's optimizers, by number."""
        if self._is_alone() and participant not in self._open:
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            for number in numbers:
                participant.optimizers[number].step()
            self._stepped()
            if len(self._participants) > 1:
                self._lockstep.meet(Meeting(_STEP, "turn", lambda _strands: None))  # else one would run to its end
            elif self._lockstep.has_new:
                self._wait_for_the_others()
            return
        self._check_batches()
        kind = ("step", loss is not None, numbers)
        self._lockstep.meet(Meeting(_STEP, kind, partial(self._step, numbers), _Loss(participant, loss)))

    def _check_batches(self) -> None:
        """Check that no member has changed a batch that others have, too.

        Raises
        ------
        CannotFuse
            One has.
        """
        if any(batches.spoiled for _, batches in self._sources):
            raise CannotFuse(
                "one of the training jobs changes its batch in place, after others have got the same batch"
            )

    def begin_epoch(self) -> None:
        """Look for changes within what the models keep, before the next fused call."""
        self._attributes.begin_epoch()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch, in this context, what the members' functions do to their models."""
        with self._attributes.active():
            yield

    def _dissolve(self) -> None:
        """Make the models and optimizers of all members ordinary again, unless gradients will still reach the array."""
        if self._array is None or self._open:
            return
        for optimizer in self._optimizers:
            optimizer.release()
        self._array.dissolve()
        for member in self._members:
            _own_states(member.optimizers)
        self._array, self._optimizers, self._members = None, [], []

    # ── the work ──────────────────────────────────────────────────────────────────────────────────

    def _is_alone(self) -> bool:
        if self._takes_turns and self._array is None:
            return True
        return len(self._participants) < 2 or bool(self.reason)

    @property
    def _takes_turns(self) -> bool:
        return self._sizing is not None and bool(self._sizing.turns)

    def _base(self) -> int:
        """Return the bytes that are in memory once for all participants."""
        return shared_bytes(participant.models for participant in self._participants)

    def _pays(self) -> bool:
        return self._sizing is None or self._sizing.fuses(len(self._participants))

    def _form(self) -> bool:
        """Stack the participants, unless they are; return whether they can be fused."""
        if self._array is not None and self._members == self._participants and self._still_fits():
            return True
        self._dissolve()
        if self.reason or self._array is not None:
            return False
        try:
            check_optimizers(self._participants)
            self._differing = [
                compare(models) for models in zip(*(each.models for each in self._participants), strict=True)
            ]
            check_parameters(self._participants)
        except CannotFuse as error:
            self._rounds_apart += 1
            if not isinstance(error, KeptBySome) or self._rounds_apart > _ROUNDS_APART:
                self._refuse(error, passing=True)
            return False
        self._rounds_apart = 0
        self._members = list(self._participants)
        self._attributes.watch([model for member in self._members for model in member.models])
        self._array = Array(self._members, **self._shares)
        self._shared(self._base())
        try:
            self._optimizers = [self._row_optimizer(number) for number in range(len(self._members[0].optimizers))]
        except CannotFuse as error:
            self._refuse(error, passing=True)
            return False
        return True

    def _row_optimizer(self, number: int) -> RowOptimizer:
        assert self._array is not None
        groups = [group for member in self._members for group in member.optimizers[number].param_groups]
        if self._array.is_padded and any(group.get("eps") == 0 for group in groups):
            raise CannotFuse("an optimizer has eps=0, by which padding of different ranks would become 0/0")
        return row_optimizer(
            [member.optimizers[number] for member in self._members],
            [segment for segment in self._array.segments if segment.place[0] == number and segment.trainable],
        )

    def _still_fits(self) -> bool:
        """Take what user code has changed in the members' models; return false if they must be stacked anew."""
        assert self._array is not None
        models = [model for member in self._members for model in member.models]
        self._attributes.look_for_hooks(models)
        if self._attributes.changed:
            try:
                differing = [compare(models) for models in zip(*(m.models for m in self._members), strict=True)]
            except CannotFuse as error:
                self._refuse(error, passing=True)
                return False
            if _values(differing) != _values(self._differing) or not self._array.has_all_parameters():
                self._calls.clear()
                return False
            self._attributes.watch(models)  # with modules that they have got since
        with torch.no_grad():
            return self._array.take_assigned_parameters(any_layout=False)

    def _check_optimizers_are_known(self, numbers: tuple[int, ...]) -> None:
        """Take the states and options of optimizers that user code has changed."""
        for number in numbers:
            if not self._optimizers[number].is_current():
                if not self._has_parameters_of(number):
                    raise CannotFuse("parameters or parameter groups were added to an optimizer, or removed")
                self._optimizers[number].discard()
                self._optimizers[number] = self._row_optimizer(number)

    def _has_parameters_of(self, number: int) -> bool:
        """Return whether an optimizer of all members has the parameters that it had when the array was formed."""
        assert self._array is not None
        segments = [segment for segment in self._array.segments if segment.place[0] == number]
        return all(
            sorted(
                (place, id(parameter))
                for place, group in enumerate(member.optimizers[number].param_groups)
                for parameter in group["params"]
            )
            == sorted((segment.place[1], id(parameter)) for segment in segments for parameter in segment.members[row])
            for row, member in enumerate(self._members)
        )

    def _refuse(self, error: CannotFuse, *, of_kinds: bool = False, passing: bool = False) -> None:
        """Continue one by one; if there are several kinds of participants, until those of other kinds have left."""
        self._dissolve()
        self.reason = str(error)
        logger.warning("%d training jobs go on one by one: %s", len(self._participants), error)
        if not of_kinds:
            self._refused(self.reason, passing)

    def _is_everyone(self, strands: Sequence[Strand]) -> bool:
        return self._array is not None and {strand.item.participant for strand in strands} == set(self._members)

    def _in_rows(self, strands: Sequence[Strand]) -> list[Strand]:
        return sorted(strands, key=lambda strand: self._members.index(strand.item.participant))

    def _forward(self, strands: Sequence[Strand]) -> None:
        with self._attributes.paused():
            self._fused_forward(strands)

    def _fused_forward(self, strands: Sequence[Strand]) -> None:
        for strand in strands:
            strand.result = UNFUSED
        if self._is_alone():  # the others may have left
            return
        if {strand.item.participant for strand in strands} != set(self._participants):
            self._note_apart()
            return
        self._apart.met()
        if not self._pays() or not self._form():
            return
        meeting = strands[0].meeting
        assert self._array is not None
        assert meeting is not None
        strands = self._in_rows(strands)
        calls: list[ModelCall] = [strand.item for strand in strands]
        kind = meeting.kind, self._array.kind
        number = calls[0].number
        self._array.take_assigned_buffers()
        models = [member.models[number] for member in self._members]
        functions = [partial(original_forward(model), model) for model in models]
        state = self._array.parameters_of(models[0]), self._array.buffers_of(models[0])
        streams = MemberStreams([strand.ambient for strand in strands])
        strands[0].ambient.restore_modes()
        assigned: dict[str, Any] = {}
        fewer = False
        try:
            stacked = [self._stacked(values) for values in zip(*(call.leaves for call in calls), strict=True)]
            args, kwargs = arguments_of(calls[0]._replace(leaves=stacked))
            if self._calls[kind] in _VERIFIED_CALLS:
                _verify(models, functions, *state, args, kwargs, streams, differing=self._differing[number])
            with _kept(state[1].values()), streams.kept():
                differing = self._differing[number]
                output = fused_call(
                    models[0], functions[0], *state, args, kwargs, streams, differing=differing, assigned=assigned
                )
        except CannotFuse as error:
            if self._stacks_more(error):
                self._fused_forward(strands)
            else:
                self._refuse(error, passing=isinstance(error, ArgumentsDiffer))
            return
        except Exception as error:  # noqa: BLE001 - of a member, perhaps: it is raised where it calls its model alone
            if not (fewer := self._sizing is not None and is_out_of_memory(error)):
                self._refuse(CannotFuse(f"{FAILED}, {type(error).__name__}: {reason_of(error)}"))
                return
        if fewer:  # not where the error holds what the call has computed
            self._fuse_fewer()
            return
        streams.close()
        assign(models, assigned)
        self._calls[kind] += 1
        self._open = set(self._members)
        leaves, structure = opened(output)
        inputs = [argument.tensor for argument in stacked if isinstance(argument, Stacked)]
        rows = [
            self._graph.rows(leaf, inputs) if isinstance(leaf, torch.Tensor) else [leaf] * len(strands)
            for leaf in leaves
        ]
        for row, strand in enumerate(strands):
            strand.result = whole([each[row] for each in rows], structure)

    def _note_apart(self) -> None:
        """Continue one by one if all have called a model, and that not for the first time, with different arguments."""
        meetings = [each.meeting for each in self._lockstep.strands if each.meeting and each.meeting.order == _FORWARD]
        calls = [(meeting.item.participant, meeting.kind) for meeting in meetings]
        if len(calls) < len(self._participants) or not self._apart.note(calls):
            return
        one = meetings[0].item
        what = difference(one, next(meeting.item for meeting in meetings if meeting.kind != one.kind))
        error = CannotFuse(f"{what}; calls with equal shapes are fused: use one batch size, and pad to one length")
        self._refuse(error, of_kinds=True)

    def facts_of(self, participant: MemberObjects) -> tuple[str, str]:
        """Return what a participant's calls are like, if they differ from others', and why it is not fused now."""
        kind = self._apart.kinds.get(participant, "")
        return kind, self.reason if kind else ""

    def _stacks_more(self, error: CannotFuse) -> bool:
        """Stack what was the same for all members, since the model may write to it; return whether that is another try.

        Buffers are small, and written to by many models. Parameters are stacked only if they were written to.
        """
        assert self._array is not None
        if self._open:
            return False
        if self._array.shares_buffers:
            self._shares["share_buffers"] = False
        elif self._array.shares_parameters and isinstance(error, ChangesShared):
            self._shares["share_parameters"] = False
        else:
            return False
        self._dissolve()
        return True

    def _stacked(self, values: tuple[Any, ...]) -> Any:
        """Return an argument of all members: tensors stacked, unless all have the same one."""
        first = values[0]
        if not isinstance(first, torch.Tensor) or all(is_same(value, first) for value in values):
            return first
        check_stackable(values)
        return Stacked(self._graph.stack(values))

    def _backward(self, strands: Sequence[Strand]) -> None:
        self._compute([strand.item for strand in strands])
        if self._is_everyone(strands):
            assert self._array is not None
            self._array.show_gradients()

    def _step(self, numbers: tuple[int, ...], strands: Sequence[Strand]) -> None:
        losses: list[_Loss] = [strand.item for strand in strands]
        array = self._array if self._is_everyone(strands) else None
        if losses[0].loss is not None:
            self._compute(losses)
        elif array is not None:
            array.take_gradients()
        if array is not None:
            with torch.no_grad():
                array.take_assigned_parameters()
            self._check_optimizers_are_known(numbers)
        uniform = all(self._optimizers[number].uniform for number in numbers) if array is not None else False
        if array is not None and uniform and array.is_complete(numbers):
            for number in numbers:
                if isinstance(self._optimizers[number], OwnOptimizers):
                    array.show_gradients()
                self._optimizers[number].step()
            self.fused_steps += 1
        else:
            if array is not None:
                array.show_gradients()
            self._step_one_by_one([loss.participant for loss in losses], numbers)
        if len(strands) == len(self._participants):
            self._time_step()
            self._stepped()
        if self._array is not None:
            self._array.drop_gradients()

    def _time_step(self) -> None:
        """Count a step of all participants in the sizing of the array."""
        sizing = self._sizing
        if sizing is None or sizing.decided:
            return
        if self._timer is not None and len(self._participants) == sizing.size:
            seconds = self._timer.seconds()
            memory, base = (used_memory(), self._base()) if sizing.completes_size(seconds) else (0.0, 0)
            before = (sizing.size, sizing.fused, sizing.decided)
            if sizing.count(seconds, memory, base + self._own_memory) and not sizing.fused:
                apart = self._apart.share
                some = f", and in {apart:.0%} of the calls their arguments differ" if apart > _SMALL_SHARE else ""
                self._take_turns(sizing, f"{sizing.verdict}{some}")
            if (sizing.size, sizing.fused, sizing.decided) != before:
                forget_peak()  # what loading took is not what a step takes
                self._resized()
        self._timer = StepTimer()

    def _take_turns(self, sizing: ArraySizing, reason: str) -> None:
        """Let members that are not fused step in turns if they share most of their memory, or else train apart."""
        members, base = self._participants, self._base()
        own = sum(member.kept_bytes() for member in members) / len(members) - base
        if not sizing.takes_turns(len(members), base, own):
            self._refuse(CannotFuse(reason))

    def _fuse_fewer(self) -> None:
        """Make steps one by one until some have left, as there is no memory to fuse all; they lose nothing."""
        sizing = self._sizing
        assert sizing is not None, "checked by the caller"
        sizing.halve(len(self._participants))
        logger.warning("%s; from here on, %d are fused at most", sizing.too_large, sizing.size)
        self._dissolve()
        if not sizing.fused:
            self._take_turns(sizing, sizing.verdict if sizing.gain_size > 1 else f"{FAILED}, {sizing.verdict}")
        self._resized()

    def _step_one_by_one(self, participants: Sequence[MemberObjects], numbers: tuple[int, ...]) -> None:
        for number in numbers:
            fused = self._optimizers[number] if self._array is not None else None
            if fused is not None:
                fused.hand_over()
            for participant in participants:
                participant.optimizers[number].step()
            if fused is not None:
                fused.take_over()

    def _compute(self, losses: Sequence[_Loss]) -> None:
        """Compute the gradients of some participants: in the array's rows if they are all of its members."""
        members = {loss.participant for loss in losses}
        # What some members compute later may need parts of this graph; those who are gone need none.
        some = not set(self._participants) <= members
        numbers = [self._members.index(member) for member in members if member in self._members]
        given = [loss.loss for loss in losses if loss.loss is not None]
        reached = self._graph.backward(given, numbers, retain_graph=some)
        if self._array is None:
            return
        if members == set(self._members):
            self._array.collect(reached)
        else:
            self._array.collect_rows(numbers, reached)


def _verify(*call: Any, **options: Any) -> None:
    """Raise `CannotFuse` with what `verify` has found."""
    reason = verify(*call, **options)
    if reason is not None:
        raise CannotFuse(reason)


@contextmanager
def _kept(stacks: Collection[torch.Tensor | SharedTensor]) -> Iterator[None]:
    """Restore stacks of buffers after an error."""
    buffers = [stack for stack in stacks if isinstance(stack, torch.Tensor)]
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        raise


def _values(differing: Sequence[Differing]) -> list[dict[str, str]]:
    return [{path: repr(each) for path, each in model.items()} for model in differing]


def _own_states(optimizers: Sequence[Optimizer]) -> None:
    """Give the states of optimizers memory of their own."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.clone()
