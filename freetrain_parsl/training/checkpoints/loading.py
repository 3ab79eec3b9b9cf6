"""Loading a restored checkpoint into the user's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from freetrain_parsl.errors import CheckpointMismatch
from freetrain_parsl.training.checkpoints import sharded
from freetrain_parsl.training.checkpoints.outside import load_outside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from freetrain_parsl.training.checkpoints.format import Restored
    from freetrain_parsl.training.checkpoints.state import Stateful


def load_into(objects: Mapping[str, Stateful], restored: Restored) -> None:
    """Load a checkpoint into objects; either may be sharded or not. Members do not communicate.

    Parameters
    ----------
    objects
        Name -> object, in the order of saving.
    restored
        The checkpoint.

    Raises
    ------
    CheckpointMismatch
        The checkpoint contains other objects.
    """
    states = restored.state["objects"]
    if list(states) != list(objects):
        _mismatch(restored, f"it contains {', '.join(states)}, but session.prepare got {', '.join(objects)}")
    for name, target in objects.items():
        _load(name, target, restored)
    try:
        load_outside(objects, restored.state.get("outside", {}))  # not in checkpoints of earlier versions
    except RuntimeError as error:
        _mismatch(restored, str(error), error)


def _load(name: str, target: Stateful, restored: Restored) -> None:
    try:
        target.load_state_dict(sharded.fill(restored.state["objects"][name], target, restored.entry.path))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        _mismatch(restored, f"its {name} does not fit: {' '.join(str(error).split())}", error)


def _mismatch(restored: Restored, difference: str, cause: Exception | None = None) -> NoReturn:
    raise CheckpointMismatch(
        f"checkpoint {restored.entry.path} belongs to another training: {difference}; "
        "undo the change, or use another trainer name or checkpoint directory"
    ) from cause
