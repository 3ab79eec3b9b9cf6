"""Models that are sharded over the processes of a training job (FSDP2), as an extension of its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.sharding import state as sharded
from freetrain_parsl.extensions.sharding import structures
from freetrain_parsl.extensions.sharding.copies import Copies
from freetrain_parsl.extensions.sharding.recall import recall
from freetrain_parsl.extensions.sharding.resharding import OtherModel, Resharding
from freetrain_parsl.extensions.sharding.saver import ShardedSaver
from freetrain_parsl.training.best_epoch import KEEP
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.extension import SessionExtension
from freetrain_parsl.training.group.replica_groups import AN_INT_IS_REFUSED
from freetrain_parsl.training.loop_state import LoopValue
from freetrain_parsl.training.preparation import size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from freetrain_parsl.protocol.options import SessionOptions
    from freetrain_parsl.training.checkpoints.format import Restored
    from freetrain_parsl.training.checkpoints.saver import SaverParts
    from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
    from freetrain_parsl.training.group.process_group import Group
    from freetrain_parsl.training.group.regrouping import GroupMember
    from freetrain_parsl.training.node_memory import NodeMemory

__all__ = ["Sharding"]


class Sharding(SessionExtension):
    """The members hold different parts of the state: FSDP2 averages the gradients, and all write the checkpoints."""

    spreads = True
    too_late = (
        "session.prepare got the model before fully_shard: call fully_shard(…, mesh=session.mesh) first, then make the "
        "optimizer, then call session.prepare"
    )

    def __init__(self) -> None:
        self.in_place = True
        self._resharding: Resharding | None = None
        self._objects: Mapping[str, Stateful] = {}
        self._saver: ShardedSaver | None = None
        self._modules: list[Any] = []
        self._parameters: set[int] = set()  # by `id`, as prepared
        self.copies: Copies | None = None
        """Copies of the members' parts; ``None`` before the loop, or without a memory for them."""
        self._members: GroupMember
        self._device: torch.device

    @classmethod
    def applies(cls, objects: Mapping[str, Stateful]) -> bool:
        """Return whether one of the objects is sharded."""
        return sharded.is_sharded(objects)

    @classmethod
    def fill(cls, saved: Any, target: Stateful, checkpoint: Path) -> Any:
        """See `sharded.fill`; either may be sharded or not."""
        return sharded.fill(saved, target, checkpoint)

    @classmethod
    def recall(cls, memory: NodeMemory, options: SessionOptions, group: Group, known: int) -> Restored | None:
        """See `recall.recall`."""
        return recall(memory, options, group, known)

    def prepared(self, objects: Mapping[str, Stateful], members: GroupMember, device: torch.device) -> None:
        """Refuse objects that are sharded over another mesh; find out whether they can change their processes in place.

        Once they cannot, by what is found here or later, the training job is saved and resumed instead.
        """
        self._members, self._device, self._objects = members, device, objects
        mesh = members.mesh(device)
        sharded.check_meshes(objects, mesh)
        sharded.check_optimizers(objects)
        if self._resharding is None:
            self._resharding = Resharding(objects)
            if not members.is_newcomer:
                self._resharding.begin(members.group)
        self._parameters = self._sharded_parameters()
        self.allowed_counts = self.resharding.sizes_allowed
        self.sharded_bytes = size_of(objects)
        if self.in_place and (problem := self.resharding.problem(mesh)) is not None:
            self._refuse(problem)

    @property
    def resharding(self) -> Resharding:
        """The shards of this member, once there are objects."""
        assert self._resharding is not None, "objects are prepared"
        return self._resharding

    def _sharded_parameters(self) -> set[int]:
        models = [each for each in self._objects.values() if isinstance(each, nn.Module)]
        return {id(parameter) for model in models for parameter in model.parameters() if is_spread(parameter)}

    def _refuse(self, problem: str) -> None:
        self.in_place = False
        self._members.note(f"saved and resumed instead of changed in place: {problem}")

    def boundary(self) -> None:
        """Free whole parameters, which a validation leaves: they are other objects than the optimizers'."""
        for module in self._modules:
            module.reshard()

    def is_pending(self) -> bool:
        """Return whether gradients are not reduced yet."""
        return self.resharding.is_pending

    def obstacle(self, group: Group, size: int | None) -> str | None:
        """Return what cannot be moved, or what there is no memory for; see `Resharding.obstacle`."""
        self.resharding.check_loop()
        return self.resharding.obstacle(group, size, self._members.next_replicas)

    def hand_over(self, group: Group, hosts: Sequence[int], generation: int) -> None:
        """Move the shards of those that leave; see `Resharding.hand_over`."""
        self.resharding.hand_over(group, hosts, generation)

    def take_over(self, group: Group) -> None:
        """Move shards to where they belong in a new group; see `Resharding.take_over`."""
        try:
            self.resharding.take_over(group, lambda: group.mesh(self._device))
        except OtherModel as error:
            self._refuse(str(error))
            raise
        if self.resharding.moved is not None:
            self.received_bytes = self.resharding.moved.traffic.received
        if self._saver is not None:
            self._saver.forget()  # a write of the group before has no members any more

    def sent(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with placeholders for the shards."""
        plain, _ = sharded.split(state)
        return dict(plain)

    def received(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with this member's own shards, as they are, instead of the placeholders."""
        objects = {name: sharded.joined(state["objects"][name], target) for name, target in self._objects.items()}
        loop = state["loop"]["shared"]
        shared = {name: sharded.joined(loop[name], LoopValue(value)) for name, value in self.resharding.loop()}
        return {**state, "objects": objects, "loop": {**state["loop"], "shared": shared}}

    def started(self, state: SessionState, in_batch: Callable[[], bool]) -> None:  # noqa: ARG002
        """Refuse what needs whole gradients, or a whole model, and parameters that were sharded after `prepared`."""
        if not self._parameters >= self._sharded_parameters():
            raise UsageError(self.too_late)
        self.resharding.follow_loop(state.loop.shared)
        self._modules = structures.sharded_modules(self.resharding.models)
        if self._device.type == "cpu":
            for module in self._modules:  # gloo of torch 2.8 adds up what it should average
                module.set_force_sum_reduction_for_comms(True)
        self.boundary()
        if state.order is not None and state.order.shards is not None:
            raise UsageError("session.loader: deterministic=True cannot be combined with a sharded model")
        if state.order is not None and state.order.batch_range is not None:
            raise UsageError(
                "session.loader: batch_range cannot be combined with a sharded model, whose gradients are averaged "
                "before their noise can be measured"
            )
        if KEEP in state.best_epochs.followed:
            raise UsageError("session.keep_best cannot keep a model that is sharded over the processes")

    def use_replicas(self, members: GroupMember) -> None:
        """Sum the gradients over the replicas, once they are reduced within each."""
        _, ints = structures.group_sizes(self.resharding.models)
        if ints:
            raise UsageError(AN_INT_IS_REFUSED.format(min(ints)))
        for module in structures.sharded_modules(self.resharding.models):
            module.set_all_reduce_hook(lambda gradient: members.group.sum_gradient(gradient))  # noqa: PLW0108 - the group changes

    def use_memory(self, memory: NodeMemory, options: SessionOptions, members: GroupMember) -> None:
        """Keep copies of the members' parts."""
        self.copies = Copies(memory, options, members)

    def copy_due(self, step: int, now: float) -> bool:
        """See `Copies.due`."""
        return self.copies is not None and self.copies.due(step, now)

    @property
    def copy_arrived(self) -> bool:
        """See `Copies.arrived`."""
        return self.copies is not None and self.copies.arrived

    def copy(self, state: Mapping[str, Any]) -> None:
        """See `Copies.begin`."""
        assert self.copies is not None, "a copy was due"
        self.resharding.check_loop()
        self.copies.begin(state)

    def copied(self) -> None:
        """See `Copies.complete`."""
        assert self.copies is not None, "a copy has arrived"
        self.copies.complete()

    def close(self) -> None:
        """Accept no further copy."""
        if self.copies is not None:
            self.copies.close()

    def spread(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is sharded."""
        return is_spread(parameter)

    def saver(self, parts: SaverParts) -> ShardedSaver:
        """Return what writes the state, on all members together."""
        if self._saver is None:
            self._saver = ShardedSaver(parts, lambda: self.copies)
        return self._saver
