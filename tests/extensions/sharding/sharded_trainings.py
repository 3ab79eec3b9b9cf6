"""Training jobs with FSDP2, for a crew; in a separate module because its processes import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import training_crew
from torch.nn.functional import cross_entropy
from training_crew import SAMPLES, Data

if TYPE_CHECKING:
    from pathlib import Path


def classify_sharded(  # noqa: C901 - one option for each thing that users do
    session: Any,
    *,
    shard: bool = True,
    root_too: bool = True,
    epochs: int = 2,
    batch_size: int = 8,
    samples: int = SAMPLES,
    clip: float | None = None,
    validate: bool = False,
    pause_after: int | None = None,
    pause_rank: int = 0,
    kill_after: int | None = None,
    kill_rank: int = 0,
    gates: dict[int, Path] | None = None,
    double: bool = False,
    awaits_copies: bool = False,
    pauses: float = 0.0,
    **loader: Any,
) -> dict[str, Any]:
    """Train with Adam and a scheduler; return all unsharded parameters."""
    from torch.distributed.fsdp import fully_shard

    model = training_crew.net()
    if double:
        model.double()
    if shard:
        fully_shard(model[0], mesh=session.mesh)
        if root_too:
            fully_shard(model, mesh=session.mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    data = session.loader(Data(samples), batch_size, **loader)
    loop = session.state(seen=0)
    own = session.state(per_process=True, mine=0.0)
    if validate:
        model(Data(samples).x.to(session.device))
    for _ in session.epochs(epochs):
        for x, y in data:
            loop.seen += 1
            own.mine = session.rank + session.metrics["steps"] / 100
            session.backward(cross_entropy(model(x.double() if double else x), y))
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            session.step()
            steps = session.metrics["steps"]
            time.sleep(pauses)
            if awaits_copies:
                await_copy(session)
            if gates and (gate := gates.get(steps)):
                gate.with_suffix(".reached").touch()
                while not gate.exists():
                    time.sleep(0.002)
            if steps == kill_after and session.rank == kill_rank:
                os.kill(os.getpid(), signal.SIGKILL)
            if steps == pause_after and session.rank == pause_rank:
                training_crew.NOTICE.pause_requested.set()
        scheduler.step()
        if validate:
            model(Data(samples).x.to(session.device))
    return {
        **session.metrics,
        "parameters": {name: whole(value) for name, value in model.state_dict().items()},
        "seen": loop.seen,
        "mine": own.mine,
    }


@dataclass(frozen=True)
class Fault:
    """What happens to one member at a call of a method.

    Parameters
    ----------
    rank
        The member.
    method
        ``module:Class.method``.
    call
        Number of the call, from 1.
    kills
        Whether the process is killed; otherwise the call, and its thread, last for ever.
    """

    rank: int
    method: str
    call: int
    kills: bool = True

    def prepare(self, rank: int) -> None:
        """Replace the method for the rest of this process's life."""
        if rank != self.rank:
            return
        module, _, path = self.method.partition(":")
        owner, _, name = path.partition(".")
        kind = getattr(import_module(module), owner)
        original, calls = getattr(kind, name), count(1)

        def faulty(*arguments: Any, **options: Any) -> Any:
            if next(calls) == self.call:
                if self.kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Event().wait()
            return original(*arguments, **options)

        setattr(kind, name, faulty)


def classify_with_faults(session: Any, *, faults: tuple[Fault, ...], **kwargs: Any) -> dict[str, Any]:
    """Train like `classify_sharded`."""
    for fault in faults:
        fault.prepare(session.rank)
    return classify_sharded(session, **kwargs)


def await_copy(session: Any) -> None:
    """Wait until the copy on its way, if any, has arrived in this process."""
    copies = getattr(session._runtime.extension, "copies", None)
    while copies is not None and copies._transfer is not None and not copies._transfer.arrived:
        time.sleep(0.001)


def shard_over_any_mesh(session: Any) -> None:
    """Shard without the session's mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    session.prepare(
        fully_shard(training_crew.net(), mesh=init_device_mesh("cpu", (session.world_size,))), torch.optim.SGD
    )


def shard_after_the_optimizer(session: Any) -> None:
    """Make the optimizer before the parameters are replaced."""
    from torch.distributed.fsdp import fully_shard

    model = training_crew.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(fully_shard(model, mesh=session.mesh), optimizer)


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, sharded or not, in host memory."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
