"""Models that are sharded over the processes of a training job (FSDP2), as an extension of its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.sharding import state as sharded
from freetrain_parsl.extensions.sharding.saver import ShardedSaver
from freetrain_parsl.training.best_epoch import KEEP
from freetrain_parsl.training.checkpoints.format import is_spread
from freetrain_parsl.training.extension import SessionExtension

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch
    from torch.distributed.fsdp import FSDPModule

    from freetrain_parsl.training.checkpoints.saver import SaverParts
    from freetrain_parsl.training.checkpoints.state import SessionState, Stateful
    from freetrain_parsl.training.group.regrouping import GroupMember

__all__ = ["Sharding"]


class Sharding(SessionExtension):
    """The members hold different parts of the state: FSDP2 averages the gradients, and all write the checkpoints."""

    in_place = False

    def __init__(self) -> None:
        self._modules: list[FSDPModule] = []

    @classmethod
    def applies(cls, objects: Mapping[str, Stateful]) -> bool:
        """Return whether one of the objects is sharded."""
        return sharded.is_sharded(objects)

    @classmethod
    def fill(cls, saved: Any, target: Stateful, checkpoint: Path) -> Any:
        """See `sharded.fill`; either may be sharded or not."""
        return sharded.fill(saved, target, checkpoint)

    def prepared(self, objects: Mapping[str, Stateful], members: GroupMember, device: torch.device) -> None:
        """Refuse objects that are sharded over another mesh, and newcomers, which would have no part."""
        if members.is_newcomer:
            raise UsageError("a model that is sharded over the processes cannot be joined in place")
        sharded.check_meshes(objects, members.mesh(device))
        from torch.distributed.fsdp import FSDPModule

        models = [thing for thing in objects.values() if isinstance(thing, nn.Module)]
        self._modules += [each for model in models for each in model.modules() if isinstance(each, FSDPModule)]

    def started(self, state: SessionState, in_batch: Callable[[], bool]) -> None:  # noqa: ARG002
        """Refuse what needs whole gradients, or a whole model."""
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

    def boundary(self) -> None:
        """Let the models have their own parameters again.

        After a validation they have whole ones in their place, which are not the optimizer's, and are freed later.
        """
        for module in self._modules:
            module.reshard()

    def spread(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is sharded."""
        return is_spread(parameter)

    def saver(self, parts: SaverParts) -> ShardedSaver:
        """Return what writes the state, on all members together."""
        return ShardedSaver(parts)
