"""The recorder of a check: what one process sees of its training job, and how it is paused, joined and interrupted."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from freetrain_parsl.extensions.checking.modes import Constants, Scalars, SteadyNorm, enter, facts_of, nodes_of
from freetrain_parsl.extensions.checking.records import (
    Frame,
    Kind,
    Leaf,
    Place,
    ProcessRecord,
    RecordedStep,
    Scalar,
    Value,
)
from freetrain_parsl.extensions.checking.sources import is_users_file
from freetrain_parsl.extensions.checking.values import (
    Flattener,
    globals_of,
    is_ours,
    leaf_of_plain,
    leaf_of_tensor,
    whole,
)
from freetrain_parsl.protocol.reports import GroupFailed, Ready
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.data.random_streams import host_places
from freetrain_parsl.training.mailbox import Membership, Regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.extensions.checking.records import Variant
    from freetrain_parsl.protocol.reports import Report
    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.data.order import Order
    from freetrain_parsl.training.mailbox import ControlMailbox
    from freetrain_parsl.training.recorder import RecordedTraining

__all__ = ["BATCHES", "EPOCHS", "NAME", "TrainingRecorder"]

EPOCHS, BATCHES = 3, 4
"""To which a training job is cut."""
NAME = "check"
"""Of the training job, in messages."""
_LEAST_TO_CUT = 3  # samples in a batch; the last batch of an epoch is a little more than half of one
_MOST_BOUNDARIES = 40 * BATCHES  # of a loop that counts its steps itself
_SKETCHED = 5_000_000  # elements; more are compared by their bits, and gradients in the first steps
_SKETCHED_STEPS = 2
_ALONE = Regroup(Membership(NAME, 2, 0, 1), abort=True)
_READY = "ready"
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class TrainingRecorder:
    """Records what one process of a check sees; a `freetrain_parsl.training.recorder.Recorder`.

    It posts the commands of its variant to the mailbox. At `ready`, a process that joins says that it is ready to.
    """

    def __init__(
        self, variant: Variant, function: Callable[..., Any], mailbox: ControlMailbox, ready: Store | None = None
    ) -> None:
        self.record = ProcessRecord(variant)
        self.training: RecordedTraining | None = None
        """The last one that made a call."""
        self._variant = variant
        self._function = inspect.unwrap(function)
        self._mailbox = mailbox
        self._ready = ready
        self._commanded = False
        self._joining = variant.joins
        self._objects: dict[str, Stateful] = {}
        self._names: dict[int, str] = {}  # id of a parameter -> its name
        self._outside: dict[str, torch.Tensor] = {}  # parameters that are in an optimizer only
        self._buffers: dict[str, tuple[nn.Module, str, int]] = {}  # name -> module, name there, id at first
        self._kinds: dict[str, Kind] = {}
        self._elements = 0
        self._generators: tuple[object, ...] = ()  # after the last batch was handed out
        self._scalars: Scalars | None = None

    # ── shorter, and in float64 ───────────────────────────────────────────────────────────────────

    def order(self, order: Order) -> Order:
        """Cut an epoch to a few batches, of which the last one is incomplete."""
        if self._variant.whole:
            return order
        size = order.batch_size
        wanted = BATCHES * size
        if size >= _LEAST_TO_CUT and not order.drop_last:
            wanted += 1 + size // 2 - size
        if order.drawn is not None:
            return replace(order, drawn=min(order.drawn, wanted))
        return replace(order, length=min(order.length, wanted))

    def epochs(self, count: int) -> int:
        """Cut the training job to a few epochs."""
        return count if self._variant.whole else min(count, EPOCHS)

    def batch(self, data: Any) -> Any:
        """Convert a batch to float64."""
        if self._variant.double:
            data = _in_double(data)
        self._generators = self._generator_states()
        return data

    def prepared(self, objects: Mapping[str, Stateful]) -> None:
        """Convert models and optimizers to float64, and note the names of their parts."""
        new = {name: thing for name, thing in objects.items() if thing not in self._objects.values()}
        self._objects |= new
        modules = {name: thing for name, thing in new.items() if isinstance(thing, nn.Module)}
        optimizers = {name: thing for name, thing in self._objects.items() if isinstance(thing, Optimizer)}
        self.record.sharded |= any(is_spread(each) for module in modules.values() for each in module.parameters())
        if self._variant.double:
            for module in modules.values():
                module.double()
                module.register_forward_pre_hook(_inputs_in_double, with_kwargs=True)
            for optimizer in optimizers.values():
                for parameter in _parameters_of(optimizer):
                    if parameter.is_floating_point():
                        parameter.data = parameter.data.double()
        for name, module in modules.items():
            self._note_module(name, module)
        self._outside = {}
        for optimizer in optimizers.values():
            for parameter in _parameters_of(optimizer):
                if id(parameter) not in self._names or self._kinds.get(self._names[id(parameter)]) is Kind.OUTSIDE:
                    name = self._name_of(parameter)
                    self._names[id(parameter)] = name
                    self._kinds[name] = Kind.OUTSIDE
                    self._outside[name] = parameter

    def _note_module(self, name: str, module: nn.Module) -> None:
        for part, each in module.named_parameters():
            self._names.setdefault(id(each), f"{name}.{part}")
            self._elements += each.numel()
        for where, part_module in module.named_modules():
            if isinstance(part_module, _BatchNorm):
                self.record.batch_norm.append(where or name)
            for key, buffer in part_module._buffers.items():  # noqa: SLF001 - named_buffers hides non-persistent ones
                if buffer is not None:
                    dotted = ".".join(filter(None, (name, where, key)))
                    self._kinds[dotted] = Kind.STATISTICS if key in _STATISTICS else Kind.BUFFER
                    self._buffers[dotted] = (part_module, key, id(buffer))

    # ── in the loop ───────────────────────────────────────────────────────────────────────────────

    def started(self) -> None:
        """Make random numbers constants from here on, if asked for."""
        if self._variant.steady:  # for the rest of this process
            enter(SteadyNorm)
            enter(Constants)
        if self._variant.scalars:
            self._scalars = enter(Scalars, self._users_line)

    def boundary(self, training: RecordedTraining) -> None:
        """Record the state, and post the command that is due."""
        self.training = training
        place = training.state.cursor.place
        if not training.members.is_newcomer and place not in self.record.states:
            # The other has recorded the place at which this one has joined: whole tensors need both.
            if not (self._joining and self.record.sharded):
                self._record(training, place)
            self._joining = False
        done = training.state.training_metrics.step
        variant = self._variant
        if self._commanded or training.members.is_newcomer:
            return
        if variant.grow_at is not None and self._ready is not None:
            # The other runs up to its loop before this one makes a step: what it reads until then is out of date.
            self._ready.wait([_READY])
        if variant.pause_at is not None and done >= variant.pause_at:
            self._commanded = True
            self._mailbox.pause_requested.set()
        elif variant.grow_at is not None and done >= variant.grow_at:
            self._commanded = True
            self._mailbox.post(Regroup(Membership(NAME, 2, 0, 2, interface="lo")))
        elif len(self.record.states) > _MOST_BOUNDARIES or done >= (variant.leave_at or math.inf):
            self._commanded = True
            self._mailbox.post(Regroup(None))

    def loss(self, training: RecordedTraining, loss: torch.Tensor) -> None:
        """Record a loss and its graph."""
        self._interrupt_if_due(training)
        place = training.state.cursor.place
        nodes = nodes_of(loss)
        runner = training.batch_runner
        assert runner is not None, "there is a batch"
        scalars: tuple[Scalar, ...] = ()
        if self._scalars is not None:
            scalars = tuple(
                Scalar(where, name, float(each.detach()))
                for where, name, each in self._scalars.take()
                if each.grad_fn in nodes
            )
        piece = runner.piece
        self.record.steps.append(
            RecordedStep(
                place,
                self._users_line(),
                float(loss.detach()),
                1.0 if piece is None else piece.weight / runner.batch.samples,
                draws=self._generator_states() != self._generators,
                graph=facts_of(nodes),
                scalars=scalars,
            )
        )

    def gradients(self, training: RecordedTraining) -> None:
        """Record the gradients of a whole batch."""
        runner = training.batch_runner
        assert runner is not None, "there is a batch"
        if not (runner.is_complete and self.record.steps):
            return
        sketched = self._is_sketched or len(self.record.made) < _SKETCHED_STEPS
        self.record.steps[-1].gradients = {
            self._names.get(id(parameter), "?"): leaf_of_tensor(whole(parameter.grad), sketched=sketched)
            for parameter in runner.parameters
            if parameter.grad is not None
        }

    def step(self) -> None:
        """Note that a step was made."""
        if not self.record.steps or self.record.steps[-1].made:  # of an array, or by a closure
            assert self.training is not None, "its loop has begun"
            place = self.training.state.cursor.place
            self.record.steps.append(RecordedStep(place, self._users_line(), math.nan, 1.0, draws=False))
        self.record.steps[-1].made = True

    def _interrupt_if_due(self, training: RecordedTraining) -> None:
        """Fail as the last member, in the middle of a batch, which the first one will repeat alone."""
        fail_at, group = self._variant.fail_at, training.members.group
        if fail_at is None or group.size == 1 or training.state.training_metrics.step < fail_at:
            return
        if group.rank:
            self._mailbox.end()
            group.abort()
        else:
            self._mailbox.post(_ALONE)

    def take_report(self, report: Report) -> None:
        """Answer a failure of the group, as a driver would: continue alone if that is the variant, else give up.

        The other member may have failed while this one still waited for it, before its own loss.
        """
        if isinstance(report, Ready):
            self.say_ready()
        if isinstance(report, GroupFailed):
            if self._variant.fail_at is not None and not self._variant.rank:
                self._mailbox.post(_ALONE)
            else:
                self._mailbox.end()

    def say_ready(self) -> None:
        """Let the process go on that waits for this one; also if this one has failed."""
        if self._ready is not None:
            self._ready.set(_READY, "")

    # ── records ───────────────────────────────────────────────────────────────────────────────────

    def _record(self, training: RecordedTraining, place: Place) -> None:
        states: dict[str, Value] = {}
        for name, thing in training.state.objects.items():
            states |= self._parts(name, thing)
        for name, parameter in self._outside.items():
            states[name] = Value(self._leaf(parameter), Kind.OUTSIDE, "parameters")
        loop = training.state.loop
        for kind, values in ((Kind.OTHER, loop.shared()), (Kind.OWN, loop.own())):
            for name, value in values:
                content = value.state_dict() if hasattr(value, "state_dict") else value
                states |= {path: Value(leaf, kind, path) for path, leaf in self._flat(content, f"state.{name}")}
        self.record.states[place] = states
        for name, (module, key, identity) in list(self._buffers.items()):
            if id(module._buffers.get(key)) != identity:  # noqa: SLF001 - as above
                self.record.events.append(("buffer assigned", name))
                del self._buffers[name]
        self.record.held[place] = self._held(training)

    def _parts(self, name: str, thing: Stateful) -> dict[str, Value]:
        """Return the parts of the state of a prepared object, with names for people."""
        if isinstance(thing, nn.Module):
            found = {}
            for part, each in thing.state_dict().items():
                if isinstance(each, torch.Tensor):
                    kind = self._kinds.get(f"{name}.{part}", Kind.PARAMETER)
                    if part.rpartition(".")[2] in _STATISTICS:
                        kind = Kind.STATISTICS
                    found[f"{name}.{part}"] = Value(self._leaf(each), kind, f"{name} {kind.value}")
            return found
        if isinstance(thing, Optimizer):
            return self._parts_of_optimizer(name, thing)
        kind = Kind.OWN if is_ours(thing) else Kind.OTHER
        return {path: Value(leaf, kind, path) for path, leaf in self._flat(thing.state_dict(), name)}

    def _parts_of_optimizer(self, name: str, optimizer: Optimizer) -> dict[str, Value]:
        found: dict[str, Value] = {}
        several = len(optimizer.param_groups) > 1
        for number, group in enumerate(optimizer.param_groups):
            of = f"group {number} of the {name}" if several else f"the {name}"
            for key, value in group.items():
                if key != "params" and not key.startswith("initial_"):
                    for path, leaf in self._flat(value, key):
                        found[f"{path} of {of}"] = Value(leaf, Kind.RATE, path)
        for parameter, state in optimizer.state.items():
            of = self._names.get(id(parameter), "a parameter")
            for key, value in state.items():
                for path, leaf in self._flat(value, key):
                    found[f"{path} of {of}"] = Value(leaf, Kind.MOMENT, f"{name} {key}")
        return found

    def _flat(self, value: object, path: str) -> Iterator[tuple[str, Leaf]]:
        """Yield the digests of what a state contains: all of it, unlike those of what the user's frames hold."""
        if isinstance(value, torch.Tensor):
            yield path, self._leaf(value)
        elif isinstance(value, dict):
            for key, each in value.items():
                yield from self._flat(each, f"{path}.{key}")
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                yield from self._flat(each, f"{path}[{index}]")
        else:
            yield path, leaf_of_plain(value)

    def _leaf(self, tensor: torch.Tensor) -> Leaf:
        return leaf_of_tensor(whole(tensor), sketched=self._is_sketched)

    @property
    def _is_sketched(self) -> bool:
        return self._elements <= _SKETCHED

    def _held(self, training: RecordedTraining) -> dict[str, Leaf]:
        """Return the digests of what the user's frames hold."""
        flattener = Flattener(set(self._known(training)))
        visited: set[object] = set()
        found: dict[str, object] = {}
        frames = list(_users_frames())
        self.record.frames = [_frame_of(frame.f_code) for frame in frames]
        for frame in frames:
            for name, value in frame.f_locals.items():
                flattener.add(f"{_name_of_code(frame.f_code)}|{name}", value)
            found |= globals_of(frame.f_code, frame.f_globals, visited)
        code = getattr(self._function, "__code__", None)
        if code is not None and code not in visited:
            found |= globals_of(code, self._function.__globals__, visited)
        for index, each in enumerate(getattr(self._function, "__defaults__", None) or ()):
            if isinstance(each, (list, dict)):
                flattener.add(f"default|default argument {index + 1}", each)
        for name, value in found.items():
            flattener.add(f"global|{name}", value)
        return flattener.leaves

    def _known(self, training: RecordedTraining) -> Iterator[int]:
        loop = training.state.loop.first_values()
        for thing in (*training.state.objects.values(), *self._outside.values(), *loop):
            yield id(thing)
            if isinstance(thing, nn.Module):
                yield from (id(each) for each in (*thing.modules(), *thing.parameters(), *thing.buffers()))
            elif isinstance(thing, Optimizer):
                yield from (id(group) for group in thing.param_groups)

    def _name_of(self, thing: torch.Tensor) -> str:
        """Return the name of a tensor in the user's frames."""
        for frame in _users_frames():
            for name, value in frame.f_locals.items():
                if value is thing:
                    return name
                if isinstance(value, nn.Module):
                    for part, parameter in value.named_parameters():
                        if parameter is thing:
                            return f"{name}.{part}"
        return f"a parameter of shape {tuple(thing.shape)}"

    def _users_line(self) -> str:
        frame = next(_users_frames(), None)
        return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _generator_states(self) -> tuple[object, ...]:
        return bytes(torch.default_generator.get_state().numpy()), *host_places()


def _users_frames() -> Iterator[FrameType]:
    """Yield the frames of the user's code, from the innermost."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - documented
    while frame is not None:
        if is_users_file(frame.f_code.co_filename) and not frame.f_code.co_name.startswith("<"):
            yield frame
        frame = frame.f_back


def _name_of_code(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # since Python 3.11


def _frame_of(code: CodeType) -> Frame:
    return Frame(_name_of_code(code), code.co_filename, code.co_firstlineno)


def _parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _in_double(data: Any) -> Any:
    """Convert the tensors in a batch."""
    if isinstance(data, torch.Tensor):
        return data.double() if data.is_floating_point() else data
    if isinstance(data, dict):
        return type(data)({key: _in_double(value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(_in_double, data))
    return type(data)(map(_in_double, data)) if isinstance(data, (list, tuple)) else data


def _inputs_in_double(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _in_double(args), _in_double(kwargs)
