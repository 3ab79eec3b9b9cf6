"""Groups whose members send what is on their GPUs: what NCCL does differently from gloo.

gloo raises the failure of a member where its operation is waited for. With NCCL only the device waits. An operation
whose peer has died never ends, and one that is aborted ends like any other, with anything in its tensors. Nothing that
comes from an operation may therefore last, such as a step of the optimizer or a received state, before the host has
seen that it has ended and that nobody has failed: see `GpuGroups.settle`.

NCCL also forms its connections at the first operation. If this is a send, members that have nothing to send do not take
part, and the others wait for them: `GpuGroups` begins with a sum.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from freetrain_parsl.errors import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "ENVIRONMENT",
    "SHARED_GPU",
    "GpuGroups",
    "GpuWork",
    "backend",
    "device",
    "facts",
    "is_on_gpu",
    "may_use_nccl",
]

ENVIRONMENT: Final = {
    # A failed operation is aborted, so that nobody waits for it for ever; by default torch ends the whole process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Otherwise a thread ends the process when an abort takes long, and asks the store once a second whether to do so.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Read by torch when a group forms."""

SHARED_GPU: Final = (
    "session.mesh: processes that share a GPU cannot shard a model: use one GPU each, or set "
    "NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or newer"
)

_SHARES_GPUS: Final = 23000  # first version of NCCL that does, and only with the variable
_LONGEST_END: Final = 1.0  # seconds for operations in progress when a member leaves
_LONGEST_ABORT: Final = 20.0  # seconds, of .5 as measured; then this process is of no use to the training job
_FIRST_LOOKS, _LOOK, _PEEK = 50, 5e-4, 0.05  # polls without sleep, seconds between later ones, and between peeks


def backend() -> str:
    """Return the name of the torch backends: decisions are on the CPU, so that nobody waits for a GPU to make them."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device() -> torch.device:
    """Return the device on which this process receives."""
    return torch.device("cuda", torch.cuda.current_device())


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is sent from a GPU."""
    return tensor.is_cuda


def facts() -> list[int]:
    """Return what the members tell each other for `may_use_nccl`: which GPU this process has, and whether it shares."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    mark = int.from_bytes(hashlib.sha256(uuid.encode()).digest()[:7], "big")
    return [mark, int(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and _nccl_version() >= _SHARES_GPUS)]


def may_use_nccl(of_members: Sequence[Sequence[int]]) -> bool:
    """Return whether members with these `facts` can use NCCL: each has a GPU of its own, or all may share one."""
    marks = {mark for mark, _ in of_members}
    return len(marks) == len(of_members) or all(shares for _, shares in of_members)


def _nccl_version() -> int:
    """Return the version of the loaded NCCL, such as 23007; torch only tells for which one it was compiled."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):  # it is in torch's library, or of another maker
        return 0
    return version.value


def _mark_of_now() -> Any:  # torch.cuda.Event, whose methods have no types
    """Return an event that has happened once the device has done all that this thread has given it."""
    mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
    mark.record()
    return mark


class GpuWork:
    """An operation on the device: `wait` only lets the following ones wait for it."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> bool:
        """Let what this thread gives the device from now on wait for the operation."""
        return self._work.wait()


class GpuGroups:
    """The NCCL side of a member's process groups; all members of the groups create this at the same time.

    Parameters
    ----------
    lost
        Returns whether a member has failed, as far as can be seen without waiting.
    """

    def __init__(self, lost: Callable[[], bool]) -> None:
        self._lost = lost
        self._aborted = False
        self._groups: list[dist.ProcessGroup] = []

    def form(self, group: dist.ProcessGroup) -> None:
        """Form the connections of a process group over NCCL.

        Raises
        ------
        PeerFailed
            A member has failed.
        RuntimeError
            A member has failed.
        """
        self._groups.append(group)
        dist.all_reduce(torch.zeros(1, device=device()), group=group)
        self.settle()

    def settle(self) -> None:
        """Wait until the device has done all operations so far; then what they have brought may be used.

        Raises
        ------
        PeerFailed
            A member has failed, so that some of it is not what was sent.
        """
        mark, looks, peek = _mark_of_now(), 0, time.monotonic() + _PEEK
        while not mark.query():
            looks += 1
            if looks > _FIRST_LOOKS:
                time.sleep(_LOOK)
            if self._aborted or (time.monotonic() > peek and self._lost()):
                break
            if time.monotonic() > peek:
                peek = time.monotonic() + _PEEK
        else:
            if not (self._aborted or any(map(_has_failed, self._groups))):
                return
        raise PeerFailed("a member failed while tensors were sent between GPUs")

    def close(self) -> None:
        """End operations that do not end by themselves, before the groups are destroyed, which would wait for them.

        In a change of the group there are none; after an error, the other members may never take part in some.
        """
        mark, end = _mark_of_now(), time.monotonic() + _LONGEST_END
        while not (self._aborted or mark.query()):
            if time.monotonic() > end:
                self.abort()
            time.sleep(_LOOK)

    def abort(self, but: dist.ProcessGroup | None = None) -> None:
        """End all operations, so that nobody waits for them, except those of a group; from any thread.

        All groups at once: the abort of one frees memory, and waits for the device, so for the operations of others.
        """
        self._aborted = True
        aborts = [threading.Thread(target=_nccl(each).abort, daemon=True) for each in self._groups if each is not but]
        for each in aborts:
            each.start()
        end = time.monotonic() + _LONGEST_ABORT
        for each in aborts:
            each.join(max(0.0, end - time.monotonic()))


def _nccl(group: dist.ProcessGroup) -> Any:
    return group._get_backend(device())  # noqa: SLF001 - no public API


def _has_failed(group: dist.ProcessGroup) -> bool:
    """Return whether torch has aborted an operation."""
    error: Any = getattr(_nccl(group), "get_error", None)
    return error is not None and error().name != "SUCCESS"
