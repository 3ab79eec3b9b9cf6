"""The storage of an array: the parameters, gradients and buffers of its members, stacked.

A member's parameters, gradients and buffers are views of its rows, so ``state_dict``, clipping, averaged models and any
optimizer of the member work on them as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from freetrain_parsl.extensions.fusion.engine.memory import MemoryLayout
from freetrain_parsl.extensions.fusion.forward.adapters import (
    common_shape,
    padded,
    rank_dimensions,
    shape_without,
    within,
)
from freetrain_parsl.extensions.fusion.forward.differences import traits
from freetrain_parsl.extensions.fusion.forward.shared_base import SharedTensor, is_shared
from freetrain_parsl.protocol.options import digest_of
from freetrain_parsl.training.checkpoints.copy_on_write import clone_of, is_clone_of, places_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["Array", "MemberObjects", "Segment"]

_STATES = 3  # of the size of what is trained: gradients, and two states of Adam


@dataclass(frozen=True, eq=False)
class MemberObjects:
    """The objects of one training job that take part in fusion.

    Parameters
    ----------
    models
        Its models, in the order of ``session.prepare``.
    optimizers
        Its optimizers, likewise.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]

    def parameters(self) -> list[tuple[tuple[int, int], nn.Parameter]]:
        """Return all parameters, each once, with its (optimizer, parameter group); (-1, -1) if it has none."""
        found: dict[nn.Parameter, tuple[int, int]] = {}
        for number, optimizer in enumerate(self.optimizers):
            for place, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    found.setdefault(parameter, (number, place))
        for model in self.models:
            for parameter in model.parameters():
                found.setdefault(parameter, (-1, -1))
        return [(place, parameter) for parameter, place in found.items()]

    def kept_bytes(self) -> int:
        """Return what it keeps in memory from step to step, with gradients, and states of optimizers as Adam has."""
        parameters = {id(each): each for model in self.models for each in model.parameters()}.values()
        buffers = {id(each): each for model in self.models for each in model.buffers()}.values()
        trained = sum(each.nbytes for each in parameters if each.requires_grad)
        return sum(each.nbytes for each in (*parameters, *buffers)) + _STATES * trained

    def parameter_kinds(self) -> list[tuple[object, ...]]:
        """Return place, shape, type and whether it is trained of each parameter; in the shape, a rank is ``None``."""
        ranks = rank_dimensions(self.models)
        return [
            (place, shape_without(each.shape, ranks.get(id(each))), each.dtype, each.requires_grad)
            for place, each in self.parameters()
        ]

    def structure(self, batch_size: int, micro_batch: int | None = None) -> str:
        """Return a digest of what all members of an array have in common: traits, shapes, optimizers, batch sizes."""
        modules = [traits(model) for model in self.models]
        parameters = [(place, shape, str(kind), trained) for place, shape, kind, trained in self.parameter_kinds()]
        buffers = [[(name, tuple(each.shape)) for name, each in model.named_buffers()] for model in self.models]
        optimizers = [type(optimizer).__qualname__ for optimizer in self.optimizers]
        return digest_of([repr((modules, parameters, buffers, optimizers, batch_size, micro_batch))])


@dataclass(eq=False)
class Segment:
    """Parameters of one optimizer's parameter group, of one type, contiguous in a row for each member.

    Parameters
    ----------
    place
        (optimizer, parameter group); (-1, -1) if they have none.
    members
        For each member: its parameters.
    rows
        Shape [members, elements].
    """

    place: tuple[int, int]
    members: list[list[nn.Parameter]]
    rows: torch.Tensor
    columns: list[slice] = field(init=False)
    """Of each parameter."""
    leaves: list[torch.Tensor] = field(init=False)
    """Of each parameter: shape [members, *shape], views of `rows` that the fused forward differentiates."""
    gradients: torch.Tensor | None = None
    """Shape as `rows`; ``None`` if there are none."""
    missing: set[tuple[int, int]] = field(default_factory=set)
    """(member, parameter) of those that were not part of the last backward pass."""
    shown: list[list[torch.Tensor | None]] = field(default_factory=list)
    """For each member: the parameters' ``.grad``, while they are views of `gradients`."""
    pointers: list[list[int]] = field(default_factory=list)
    """For each member: where its parameters are in memory."""
    shapes: list[torch.Size] = field(init=False)
    """Of each parameter; the largest, if the members' have different ranks."""
    own_shapes: list[list[torch.Size]] = field(init=False)
    """For each member: the shapes of its parameters."""
    layouts: list[MemoryLayout] = field(init=False)
    """Of each parameter."""
    strides: list[tuple[int, ...]] = field(init=False)
    """Of each parameter."""
    trainable_at_first: bool = field(init=False)
    """Whether its parameters required gradients when they were stacked."""

    def __post_init__(self) -> None:
        ends = 0
        self.trainable_at_first = self.members[0][0].requires_grad
        self.own_shapes = [[parameter.shape for parameter in member] for member in self.members]
        self.shapes = [common_shape(each) for each in zip(*self.own_shapes, strict=True)]
        self.layouts = [
            MemoryLayout(parameter.new_empty(shape) if self.is_padded(number) else parameter)
            for number, (parameter, shape) in enumerate(zip(self.members[0], self.shapes, strict=True))
        ]
        self.columns = []
        for shape in self.shapes:
            self.columns.append(slice(ends, ends + shape.numel()))
            ends += shape.numel()
        self.leaves = [
            self.stacked(self.rows, number).detach().requires_grad_(parameter.requires_grad)
            for number, parameter in enumerate(self.members[0])
        ]
        self.strides = [leaf[0].stride() for leaf in self.leaves]

    @property
    def trainable(self) -> bool:
        """Whether its parameters get gradients."""
        return self.trainable_at_first

    def is_in_place(self) -> bool:
        """Return whether all parameters are where they were stacked, and none was frozen or unfrozen."""
        trainable = self.trainable_at_first
        return all(
            [parameter.data_ptr() for parameter in member] == pointers
            and [parameter.shape for parameter in member] == shapes
            and [parameter.stride() for parameter in member] == self.strides
            and all(parameter.requires_grad is trainable for parameter in member)
            for member, pointers, shapes in zip(self.members, self.pointers, self.own_shapes, strict=True)
        )

    def is_padded(self, number: int) -> bool:
        """Return whether a parameter has another shape in some members."""
        return any(shapes[number] != self.shapes[number] for shapes in self.own_shapes)

    def has_stacked(self, member: int, number: int) -> bool:
        """Return whether a parameter is where it was stacked, and seen as it was: not transposed, for example."""
        parameter = self.members[member][number]
        there = parameter.data_ptr() == self.pointers[member][number]
        as_seen = parameter.shape == self.own_shapes[member][number] and parameter.stride() == self.strides[number]
        return there and as_seen

    def collect(self, reached: Mapping[int, Collection[int]] | None) -> None:
        """See `Array.collect`."""
        stacked = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None
        self.missing = set()
        own = [[parameter.grad for parameter in member] for member in self.members]
        if reached is None and all(gradient is None for member in own for gradient in member):
            parts = [
                self.layouts[number].flat(gradient) for number, gradient in enumerate(stacked) if gradient is not None
            ]
            if len(parts) == len(stacked):
                self.gradients = torch.cat(parts, 1)
                return
        self.gradients = torch.zeros_like(self.rows)
        for number, gradient in enumerate(stacked):
            if gradient is not None:
                self.stacked(self.gradients, number).copy_(gradient)
            for row, member in enumerate(own):
                part = member[number]
                if part is not None:
                    self.of(self.gradients, row, number).add_(part)
                    self.members[row][number].grad = None
                elif gradient is None or self.is_unused(gradient, row, number, reached):
                    self.missing.add((row, number))

    def is_unused(
        self, gradient: torch.Tensor, row: int, number: int, reached: Mapping[int, Collection[int]] | None
    ) -> bool:
        """Return whether a member's loss does not depend on a parameter, whose stacked gradient is given."""
        return reached is not None and id(self.leaves[number]) not in reached[row] and not gradient[row].any()

    def show_gradients(self) -> None:
        """See `Array.show_gradients`."""
        assert self.gradients is not None, "there are some"
        self.shown = []
        for row, member in enumerate(self.members):
            views = [
                None if (row, number) in self.missing else self.of(self.gradients, row, number)
                for number in range(len(member))
            ]
            for parameter, view in zip(member, views, strict=True):
                parameter.grad = view
            self.shown.append(views)

    def has_own_gradients(self) -> bool:
        """Return whether user code has assigned a parameter's ``.grad``: optimizers step such frozen ones, too."""
        return any(parameter.grad is not None for member in self.members for parameter in member)

    def take_gradients(self) -> None:
        """See `Array.take_gradients`."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.rows)
        self.missing = set()
        for row, member in enumerate(self.members):
            for number, parameter in enumerate(member):
                if parameter.grad is None:
                    self.missing.add((row, number))
                elif not self.shown or parameter.grad is not self.shown[row][number]:
                    self.of(self.gradients, row, number).copy_(parameter.grad)

    def stacked(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        """Return a parameter's part of a tensor of the shape of `rows`, as [members, *shape]."""
        return self.layouts[number].shaped(rows[:, self.columns[number]])

    def of(self, rows: torch.Tensor, member: int, number: int) -> torch.Tensor:
        """Return a member's part of `stacked`."""
        return self.part(rows[member], member, number)

    def part(self, row: torch.Tensor, member: int, number: int) -> torch.Tensor:
        """Return a member's parameter's part of a tensor of the shape of a row, without what pads it."""
        return within(self.layouts[number].shaped(row[self.columns[number]]), self.own_shapes[member][number])

    def flat(self, values: torch.Tensor, number: int) -> torch.Tensor:
        """Return a parameter's values, padded, as its part of a row."""
        return self.layouts[number].flat(padded(values, self.shapes[number]))


class SharedSegment(Segment):
    """Frozen parameters that are the same in all members: not stacked; each member has copy-on-write clones of them.

    Its rows have no elements; its leaves are clones of the parameters themselves.
    """

    def __post_init__(self) -> None:
        self.trainable_at_first = False
        first = self.members[0]
        self.shapes = [parameter.shape for parameter in first]
        self.own_shapes = [self.shapes for _ in self.members]
        self.layouts = [MemoryLayout(parameter) for parameter in first]
        self.strides = [parameter.stride() for parameter in first]
        self.leaves = [clone_of(parameter) for parameter in first]
        self._places = places_of(self.leaves)

    def is_in_place(self) -> bool:
        """See `Segment`: whoever has written to a clone has memory of its own."""
        return all(
            places_of(member) == self._places
            and [parameter.shape for parameter in member] == self.shapes
            and [parameter.stride() for parameter in member] == self.strides
            and not any(parameter.requires_grad for parameter in member)
            for member in self.members
        )


class Array:
    """The stacked state of several members whose models have the same structure.

    Parameters
    ----------
    members
        Their objects. Their parameters and buffers become views, unless they are shared ones; the tensor objects stay
        the same.
    share_parameters, share_buffers
        Whether to leave frozen ones that are the same in all members unstacked.
    """

    def __init__(
        self, members: Sequence[MemberObjects], *, share_parameters: bool = True, share_buffers: bool = True
    ) -> None:
        self.members = list(members)
        self._share_parameters = share_parameters
        self._share_buffers = share_buffers
        self.segments = self._segments()
        self.kind = tuple(
            (s.trainable, s.rows.dtype, *(tuple(each.order) for each in s.layouts)) for s in self.segments
        )
        """Which parameters get gradients, and their types and layouts in memory."""
        self._leaf_of = {
            id(parameter): leaf
            for segment in self.segments
            for parameter, leaf in zip(segment.members[0], segment.leaves, strict=True)
        }
        self._shared = {id(leaf) for s in self.segments if isinstance(s, SharedSegment) for leaf in s.leaves}
        self._stacks: dict[int, torch.Tensor | SharedTensor] = {}  # id of the first member's buffer -> stack
        self._buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []  # module, name, buffer, its row
        self._shared_buffers: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []  # …, the shared tensor
        with torch.no_grad():
            self._stack_buffers()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_padded(self) -> bool:
        """Whether members have parameters of different ranks."""
        return any(segment.is_padded(number) for segment in self.segments for number in range(len(segment.shapes)))

    @property
    def shares_parameters(self) -> bool:
        """Whether some parameters are not stacked."""
        return bool(self._shared)

    @property
    def shares_buffers(self) -> bool:
        """Whether some buffers are not stacked."""
        return bool(self._shared_buffers)

    def parameters_of(self, model: nn.Module) -> dict[str, torch.Tensor | SharedTensor]:
        """Return the stacked parameters of a model of the first member, by all their names, tied ones included."""
        leaves = {
            name: self._leaf_of[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        return {name: SharedTensor(leaf) if id(leaf) in self._shared else leaf for name, leaf in leaves.items()}

    def buffers_of(self, model: nn.Module) -> dict[str, torch.Tensor | SharedTensor]:
        """Return the stacked buffers of a model of the first member, by all their names."""
        return {name: self._stacks[id(buffer)] for name, buffer in model.named_buffers(remove_duplicate=False)}

    def take_assigned_buffers(self) -> None:
        """Take buffers that a member has assigned anew, as ``self.buffer`` or ``buffer.data``, into their rows."""
        for module, name, buffer, row in self._buffers:
            now = module._buffers.get(name)
            if now is not None and (now is not buffer or now.data_ptr() != row.data_ptr()):
                row.copy_(now)
                module._buffers[name] = buffer
                buffer.data = row

    def has_all_parameters(self) -> bool:
        """Return whether the models have the parameters and buffers that they had."""
        now = {id(parameter) for member in self.members for _, parameter in member.parameters()}
        then = {id(parameter) for segment in self.segments for each in segment.members for parameter in each}
        return now == then and all(id(b) in self._stacks for _, _, b in _buffers(self.members[0].models))

    def take_assigned_parameters(self, *, any_layout: bool = True) -> bool:
        """Take parameters whose ``.data`` was assigned anew into their rows.

        Parameters
        ----------
        any_layout
            Also those with another layout in memory, such as channels last, which is lost.

        Returns
        -------
        valid
            Whether the array still fits its members: false if they have frozen or unfrozen parameters, have written to
            shared ones, or have assigned tensors of another shape, type or layout.
        """
        fits = all(
            module._buffers.get(name) is buffer and is_clone_of(buffer, shared)
            for module, name, buffer, shared in self._shared_buffers
        )
        for segment in self.segments:
            trainable = segment.trainable_at_first
            if segment.is_in_place():
                continue
            if isinstance(segment, SharedSegment):
                fits = False
                continue
            for row, member in enumerate(segment.members):
                for number, parameter in enumerate(member):
                    if parameter.requires_grad is not trainable:
                        return False
                    if not segment.has_stacked(row, number):
                        if parameter.shape != segment.own_shapes[row][number] or parameter.dtype != segment.rows.dtype:
                            return False
                        if not any_layout and MemoryLayout(parameter).order != segment.layouts[number].order:
                            return False
                        own = segment.of(segment.rows, row, number)
                        own.copy_(parameter.detach().clone())  # it may be another view of the same memory
                        parameter.data = own
        return fits

    def collect(self, reached: Mapping[int, Collection[int]] | None = None) -> None:
        """Move the gradients of a backward pass into the rows' gradients.

        What reached a member's own parameters, as from a penalty, is added to what reached the stacked ones.

        Parameters
        ----------
        reached
            For each row, the identities of the leaves that the member's loss depends on; ``None``: all have the same.
        """
        for segment in self.segments:
            if segment.trainable:
                segment.collect(reached)

    def is_complete(self, optimizers: Collection[int]) -> bool:
        """Return whether, of these optimizers, by number, every trainable parameter, and no other, has a gradient."""
        return not any(
            segment.missing or segment.gradients is None if segment.trainable else segment.has_own_gradients()
            for segment in self.segments
            if segment.place[0] in optimizers
        )

    def show_gradients(self) -> None:
        """Set the parameters' ``.grad`` to views of the rows' gradients; to ``None`` where there is none."""
        for segment in self.segments:
            if segment.gradients is not None:
                segment.show_gradients()

    def take_gradients(self) -> None:
        """Take the parameters' ``.grad``, after user code may have changed them."""
        for segment in self.segments:
            if segment.trainable:
                segment.take_gradients()

    def collect_rows(self, rows: Sequence[int], reached: Mapping[int, Collection[int]] | None = None) -> None:
        """Move the gradients of a backward pass of some members into their parameters' ``.grad``; see `collect`."""
        for segment in self.segments:
            for number, leaf in enumerate(segment.leaves):
                if leaf.grad is None:
                    continue
                for row in rows:
                    if segment.is_unused(leaf.grad, row, number, reached):
                        continue
                    parameter = segment.members[row][number]
                    part = within(leaf.grad[row], segment.own_shapes[row][number]).clone()
                    parameter.grad = part if parameter.grad is None else parameter.grad + part
                leaf.grad = None

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        for segment in self.segments:
            segment.gradients = None
            if segment.shown or not segment.trainable:
                segment.shown = []
                for member in segment.members:
                    for parameter in member:
                        parameter.grad = None

    def dissolve(self) -> None:
        """Give each member separate storage again."""
        with torch.no_grad():
            self.take_assigned_buffers()
            for segment in self.segments:
                if isinstance(segment, SharedSegment):  # the clones are the members' own
                    continue
                for row, member in enumerate(segment.members):
                    own = segment.rows[row].clone()
                    for number, parameter in enumerate(member):
                        if segment.has_stacked(row, number):  # else it was assigned anew
                            own_part = segment.part(own, row, number)
                            parameter.data = own_part.contiguous() if segment.is_padded(number) else own_part
                        if parameter.grad is not None:
                            parameter.grad = parameter.grad.clone()
            for _, _, buffer, view in self._buffers:
                buffer.data = view.clone()

    def _segments(self) -> list[Segment]:
        def kind(item: tuple[tuple[int, int], nn.Parameter]) -> tuple[object, ...]:
            place, parameter = item
            return place, parameter.dtype, parameter.device, parameter.requires_grad, id(parameter) in shared

        members = [member.parameters() for member in self.members]
        alike = [[parameter for _, parameter in each] for each in zip(*members, strict=True)]
        shared = {id(each[0]) for each in alike if self._share_parameters and is_shared(each)}
        segments: list[Segment] = []
        begin = 0
        for _, run in groupby(members[0], kind):
            end = begin + len(list(run))
            parameters = [[parameter for _, parameter in member[begin:end]] for member in members]
            first = parameters[0][0]
            if id(first) in shared:
                segments.append(SharedSegment(members[0][begin][0], parameters, first.detach().new_empty(0)))
                begin = end
                continue
            shapes = [common_shape(parameter.shape for parameter in each) for each in zip(*parameters, strict=True)]
            rows = torch.stack(
                [
                    torch.cat([_flat(p.detach(), shape) for p, shape in zip(member, shapes, strict=True)])
                    for member in parameters
                ]
            )
            segment = Segment(members[0][begin][0], parameters, rows)
            for row, member in enumerate(parameters):
                for number, parameter in enumerate(member):
                    parameter.data = segment.of(rows, row, number)
            segment.pointers = [[parameter.data_ptr() for parameter in member] for member in parameters]
            segments.append(segment)
            begin = end
        return segments

    def _stack_buffers(self) -> None:
        each = [list(_buffers(member.models)) for member in self.members]
        for place, (_, _, first) in enumerate(each[0]):
            if id(first) in self._stacks:
                continue
            if self._share_buffers and is_shared([buffers[place][2] for buffers in each]):
                self._stacks[id(first)] = SharedTensor(clone_of(first))
                continue
            stack = torch.stack([buffers[place][2].detach() for buffers in each])
            self._stacks[id(first)] = stack
        for row, buffers in enumerate(each):
            for place, (module, name, buffer) in enumerate(buffers):
                stacked = self._stacks[id(each[0][place][2])]
                if isinstance(stacked, SharedTensor):
                    self._shared_buffers.append((module, name, buffer, stacked.tensor))
                    continue
                view = stacked[row]
                buffer.data = view
                self._buffers.append((module, name, buffer, view))


def _flat(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    values = padded(values, shape)
    return MemoryLayout(values).flat(values)


def _buffers(models: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for model in models:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer
