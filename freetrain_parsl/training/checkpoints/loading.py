"""Loading a restored checkpoint into the user's objects."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from freetrain_parsl.errors import DamagedCheckpoint, StateLost
from freetrain_parsl.training.checkpoints.copy_on_write import address_of
from freetrain_parsl.training.checkpoints.format import is_spread, other_job
from freetrain_parsl.training.checkpoints.parameters import add_missing_groups, load_outside
from freetrain_parsl.training.extension import filled
from freetrain_parsl.training.loop_state import LoopValue

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from freetrain_parsl.training.checkpoints.format import Restored, State
    from freetrain_parsl.training.checkpoints.state import Stateful
    from freetrain_parsl.training.loop_state import LoopStates

__all__ = ["FINAL", "Restoration"]

FINAL = "the training job is done"
"""Reason of the checkpoint that is saved at the end."""

logger = logging.getLogger(__name__)


class Restoration:
    """A checkpoint that is loaded into objects: when they are prepared, and again if user code changes them."""

    def __init__(self, restored: Restored) -> None:
        self._restored = restored
        self._loaded: dict[str, Any] = {}  # name -> marks of the object as it was loaded

    @property
    def state(self) -> State:
        """The whole state."""
        return self._restored.state

    @property
    def is_final(self) -> bool:
        """Whether it was saved at the end of the training job."""
        return self._restored.manifest.get("reason") == FINAL

    def load(self, objects: Mapping[str, Stateful], new: Iterable[str]) -> None:
        """Load the state of new objects; either may be sharded or not. Members do not communicate.

        Parameters
        ----------
        objects
            All objects so far, by name, in the order of saving.
        new
            The names of the new ones.

        Raises
        ------
        CheckpointMismatch
            The checkpoint contains other objects.
        StateLost
            It has been damaged since it was verified.
        """
        if list(self._restored.state["objects"])[: len(objects)] != list(objects):
            self._mismatch_of(objects)
        for name in new:
            self._load(name, objects)
        self._load_outside(objects)

    def loop(self, values: LoopStates, names: Collection[str] | None = None) -> dict[str, Any]:
        """Return the state of the loop as `values` can load it; `names`: only of these.

        Raises
        ------
        CheckpointMismatch
            A sharded tensor in it has no counterpart in the first values.
        """
        saved = self._restored.state["loop"]
        shared = {}
        for name, value in values.shared():
            if name in saved["shared"] and (names is None or name in names):
                try:
                    shared[name] = self._filled(saved["shared"][name], LoopValue(value))
                except KeyError as error:
                    self._mismatch(
                        f"session.state's {name} has sharded tensors, which are restored into those of its first "
                        "value: declare it with tensors like the parameters, as in p.detach().clone()", error
                    )  # fmt: skip
        return {**saved, "shared": shared}

    def check_complete(self, objects: Mapping[str, Stateful]) -> None:
        """Raise CheckpointMismatch unless all objects of the checkpoint have been prepared."""
        if list(self._restored.state["objects"]) != list(objects):
            self._mismatch_of(objects)

    def load_again(self, objects: Mapping[str, Stateful], *, tell: bool = True) -> None:
        """Load what user code has changed since: such as learning rates, by a new scheduler.

        Parameters
        ----------
        objects
            All objects, by name.
        tell
            Whether to warn of what has changed.

        Raises
        ------
        CheckpointMismatch
            The checkpoint contains further objects.
        """
        self.check_complete(objects)
        changed = [name for name, thing in objects.items() if _marks(thing.state_dict()) != self._loaded[name]]
        told = [name for name in changed if not self._is_of_scheduler(name, objects)]
        for name in changed:
            self._load(name, objects)
        self._load_outside(objects)
        if told and tell:
            logger.warning(
                "%s changed after session.prepare had restored it; %s was loaded again: it is the newest state",
                ", ".join(told), self._restored.entry.path,
            )  # fmt: skip

    def _is_of_scheduler(self, name: str, objects: Mapping[str, Stateful]) -> bool:
        """Return whether an object is an optimizer of which a scheduler has set hyperparameters when it was made."""
        thing = objects[name]
        scheduled = any(isinstance(other, LRScheduler) and other.optimizer is thing for other in objects.values())
        return (
            isinstance(thing, Optimizer)
            and scheduled
            and _marks(thing.state_dict())["state"] == self._loaded[name]["state"]
        )

    def _load(self, name: str, objects: Mapping[str, Stateful]) -> None:
        target, state = objects[name], self._restored.state["objects"][name]
        try:
            if isinstance(target, Optimizer):
                add_missing_groups(target, state, self._restored.state["groups"][name], objects)
            target.load_state_dict(self._filled(state, target))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            self._mismatch(f"its {name} does not fit: {' '.join(str(error).split())}", error)
        self._loaded[name] = _marks(target.state_dict())

    def _filled(self, saved: Any, target: Any) -> Any:
        """Return a saved state as `target` can load it; parts of a sharded one are read now.

        Raises
        ------
        StateLost
            The checkpoint has been damaged since it was verified: the training job resumes from one before it.
        DamagedCheckpoint
            It cannot be read although it is intact.
        """
        entry = self._restored.entry
        try:
            return filled(saved, target, entry.path)
        except DamagedCheckpoint as error:
            try:
                entry.verify()
            except DamagedCheckpoint:
                raise StateLost(f"{error}; it was intact when the training job started: run it again") from error
            raise

    def _load_outside(self, objects: Mapping[str, Stateful]) -> None:
        try:
            load_outside(objects, self._restored.state["outside"])
        except RuntimeError as error:
            self._mismatch(str(error), error)

    def _mismatch_of(self, objects: Mapping[str, Stateful]) -> NoReturn:
        states = self._restored.state["objects"]
        self._mismatch(f"it contains {', '.join(states)}, but session.prepare got {', '.join(objects)}")

    def _mismatch(self, difference: str, cause: Exception | None = None) -> NoReturn:
        raise other_job(self._restored.entry.path, difference) from cause


def _marks(value: Any) -> Any:
    """Return what differs once a state has changed: where its tensors are and their versions, and its plain values."""
    if isinstance(value, torch.Tensor):
        place = address_of(value) if value.layout is torch.strided and not is_spread(value) else 0
        return place, 0 if value.is_inference() else value._version  # noqa: SLF001 - torch has no public counter
    if isinstance(value, dict):
        return {key: _marks(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marks(item) for item in value]
    return copy.deepcopy(value)
