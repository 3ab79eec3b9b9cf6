"""Copies of a state in host memory, which the training job does not change, and the thread that writes them."""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from freetrain_parsl.training.checkpoints.copy_on_write import clone_of, is_clone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class HostBuffers:
    """Copies states, reusing the memory of the previous copy where shapes match."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(self, state: Any) -> Any:
        """Return a state with all its tensors in host memory; this overwrites the previous copy.

        Copy-on-write clones are cloned instead, wherever they are. Tensors that share their memory, such as tied
        weights, share it in the copy.

        Parameters
        ----------
        state
            Tensors, numbers, strings, lists and dictionaries.
        """
        copying = _Copying(self._buffers)
        with _one_thread():
            result = copying.copy(state, ())
        for device in copying.devices:
            torch.cuda.current_stream(device).synchronize()
        self._buffers = copying.buffers  # releases the memory of tensors that no longer exist
        return result


def in_host_memory(state: Any) -> Any:
    """Return a state in host memory: tensors of devices are copied unless they are clones, all others are shared."""
    return _Copying({}, share=True).copy(state, ())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copy with one thread: memory bandwidth is the limit or, on shared cores, threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Copying:
    """A copy in progress."""

    def __init__(self, before: dict[tuple[Any, ...], torch.Tensor], *, share: bool = False) -> None:
        self._before = before
        self._share = share
        self._seen: dict[tuple[Any, ...], torch.Tensor] = {}
        self.buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self.devices: set[torch.device] = set()

    def copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, _IMMUTABLE):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), path)
        if isinstance(value, dict):
            result = copy.copy(value)  # keeps the module versions that torch attaches to a model's state
            for key, item in value.items():
                result[key] = self.copy(item, (*path, key))
            return result
        if type(value) in (list, tuple):
            return type(value)(self.copy(item, (*path, position)) for position, item in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        if is_clone(tensor):
            return clone_of(tensor)
        # A view would be written with all of the memory that it is a part of.
        if self._share and tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
        if tensor.layout is not torch.strided:
            return tensor.to("cpu", copy=True)
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._seen:
            return self._seen[memory]
        buffer = self._before.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda and not self._share)
        asynchronous = buffer.is_pinned() if tensor.is_cuda else False
        buffer.copy_(tensor, non_blocking=asynchronous)
        if asynchronous:
            self.devices.add(tensor.device)
        self.buffers[path] = self._seen[memory] = buffer
        return buffer


T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """The outcome of a background task.

    Parameters
    ----------
    value
        Its return value; ``None`` if it failed.
    error
        Its exception, if it failed.
    processor_seconds
        CPU time of its thread.
    """

    value: T | None
    error: Exception | None
    processor_seconds: float


class Background(Generic[T]):
    """Runs a function in a thread; the interpreter waits for it at exit, so that a write is not cut off."""

    def __init__(self) -> None:
        self._running: Future[Done[T]] | None = None

    @property
    def busy(self) -> bool:
        """Whether there is a task whose outcome has not been taken."""
        return self._running is not None

    @property
    def done(self) -> bool:
        """Whether there is a completed task whose outcome has not been taken."""
        return self._running is not None and self._running.done()

    def start(self, work: Callable[[], T]) -> None:
        """Start a task; the outcome of the previous one must have been taken."""
        assert self._running is None, "one task at a time"
        self._running = Future()
        threading.Thread(target=_run, args=(work, self._running), name="freetrain-checkpoint").start()

    def take(self, *, wait: bool) -> Done[T] | None:
        """Return the outcome of the task; ``None`` if there is no task, or it is not done and `wait` is false."""
        if self._running is None or (not wait and not self._running.done()):
            return None
        done = self._running.result()
        self._running = None
        return done


def _run(work: Callable[[], T], outcome: Future[Done[T]]) -> None:
    begun = time.thread_time()
    value, problem = None, None
    try:
        value = work()
    except Exception as error:  # noqa: BLE001 - it is reported to the training job
        problem = error
    outcome.set_result(Done(value, problem, time.thread_time() - begun))
