"""Running one fragment: the slot's way into a training, and the only one.

The user's function is called afresh in each fragment. It ends in one of four ways: it returns (`Finished`),
a step boundary decides to stop (`Paused`, the state is saved), a peer vanishes (`PeerLost`: nothing is saved,
the last checkpoint holds), or it raises an error of its own, which goes through unchanged.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.errors import PeerLost
from freetrain_parsl.training import rng
from freetrain_parsl.training.engine import Engine, Unwind
from freetrain_parsl.training.membership import gist, is_lost_peer, join
from freetrain_parsl.training.session import TrainingSession
from freetrain_parsl.training.terms import (
    Clock,
    Finished,
    Membership,
    Notice,
    Paused,
    PauseReason,
    Progress,
    SessionOptions,
)

if TYPE_CHECKING:  # torch.distributed does not declare it among its exports
    from torch._C._distributed_c10d import Store

__all__ = [
    "Finished",
    "Membership",
    "Notice",
    "PauseReason",
    "Paused",
    "Progress",
    "SessionOptions",
    "run_alone",
    "run_fragment",
]

TrainingFunction = Callable[..., Any]
"""Takes a `TrainingSession`, then the user's own arguments."""


def run_fragment(
    function: TrainingFunction,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: SessionOptions,
    membership: Membership,
    store: Store | None,
    notice: Notice,
    report: Callable[[Progress], None],
    clock: Clock = time.monotonic,
) -> Finished | Paused:
    """Run a training in this process until it is done or has to leave.

    Parameters
    ----------
    function, args, kwargs
        The user's function, called as ``function(session, *args, **kwargs)``.
    options
        How the training keeps its state; the same on all members.
    membership
        This process's place in the fragment.
    store
        Where the members meet; not needed by a group of one.
    notice
        What the slot tells while the training runs.
    report
        Gets the progress on the first member: at the start, at checkpoints, at the end, and between them at
        most twice a second. It must not block.
    clock
        Seconds on a clock that never goes back.

    Raises
    ------
    PeerLost
        Another member is gone; what was done since the last checkpoint is lost.
    CheckpointError
        The state cannot be read, or could not be saved at the end of the fragment.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        with join(membership, store) as group:
            engine = Engine(options, group, notice, report, clock)
            session = TrainingSession(engine)
            rng.seed_all(options.seed)
            try:
                value = function(session, *args, **(kwargs or {}))
            except Unwind:
                value = None
            if engine.unwinding is None:
                engine.finish()
            checkpoint = engine.keeper.newest.path if engine.keeper.newest else None
            if engine.unwinding is None:
                return Finished(value, engine.progress(), checkpoint)
            return Paused(engine.unwinding, engine.progress(), checkpoint)
    except Exception as error:
        if membership.world_size > 1 and is_lost_peer(error) and not isinstance(error, PeerLost):
            raise PeerLost(
                f"trainer {options.name!r}: lost a member of a group of {membership.world_size} ({gist(error)})"
            ) from error
        raise
    finally:
        # The process stays, and may train another model next: give memory and data workers back now.
        session = engine = None  # type: ignore[assignment]  # their life ends here
        gc.collect()


def run_alone(
    function: TrainingFunction, *args: Any, directory: Path | None = None, seed: int = 0, **kwargs: Any
) -> Any:
    """Run a training function to its end in this process, without Parsl: to try it out or to debug it.

    Parameters
    ----------
    function, args, kwargs
        Called as ``function(session, *args, **kwargs)``.
    directory
        Where its checkpoints go; a second call goes on from them. ``None``: they are thrown away.
    seed
        Start of every random number.

    Returns
    -------
    value
        What the function returned.
    """
    with tempfile.TemporaryDirectory(prefix="freetrain-") as scratch:
        end = run_fragment(
            function,
            args,
            kwargs,
            options=SessionOptions("alone", directory or Path(scratch), seed=seed),
            membership=Membership("alone"),
            store=None,
            notice=Notice(),
            report=lambda _progress: None,
        )
    assert isinstance(end, Finished)  # nobody has the notice to pause it with
    return end.value
