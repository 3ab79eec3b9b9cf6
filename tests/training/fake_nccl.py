"""NCCL's rules without a GPU: what works with gloo only fails on a CPU, too.

`install` changes one process. Its memory is divided in two: what a factory makes without a device, and what is computed
from that, is on the *host*; parameters, what was moved to the session's device and what comes from it are on the *GPU*.
Operations of ``torch.distributed`` on the host's tensors are gloo's, as in the product's groups, which have both
backends. Those on the GPU's tensors have NCCL's rules:

- The first operation of a group is one of all members.
- Sends and receives come in batches: single ones would form a further group for each pair.
- Tensors are contiguous, in the GPU's memory, and of a type that NCCL knows; there are no tags, and no receipts from
  any source. Objects travel over the host's groups only.
- Operations of one group are given by one thread.
- An abort waits for the device, so for operations of other groups that have not ended and are not aborted. So does
  the end of a group.
- Nobody is told of a failure: an operation whose peer has died never ends, and if it is aborted, its result is
  anything. Meanwhile the host continues; only the device waits.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import training_crew
from torch.overrides import TorchFunctionMode

from freetrain_parsl.training.group import gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_HOST = "_on_host"
_LOOK = timedelta(milliseconds=200)
_LONGEST_ABORT = 10.0
_KNOWN = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip
_OF_ALL = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "reduce_scatter",
    "all_to_all_single", "broadcast", "reduce", "gather", "scatter",
)  # fmt: skip
_SINGLE = ("isend", "irecv", "send", "recv")
_OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


class NotWithNccl(Exception):
    """A rule is broken; not a RuntimeError, which would be taken for the failure of a member."""


class Placement(TorchFunctionMode):
    """Marks the tensors that are in host memory on a machine with a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if type(result) is not torch.Tensor:
            return result
        given = list(tensors_in([*args, *kwargs.values()]))
        devices = [each for each in (*args, *kwargs.values()) if isinstance(each, (torch.device, str))]
        if func in (torch.Tensor.cpu, torch.Tensor.to) and (func is torch.Tensor.cpu or devices):
            host = func is torch.Tensor.cpu or isinstance(devices[0], str)
            if host != is_on_host(result):
                result = torch.ops.aten.alias(result)
        elif any(result is each for each in given):
            return result
        elif given:
            host = all(map(is_on_host, given))
        else:
            host = not isinstance(kwargs.get("device"), torch.device)
        if host:
            setattr(result, _HOST, True)
        return result


def is_on_host(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _HOST, False)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class Communicator:
    """NCCL's side of one process group."""

    def __init__(self, others: Callable[[], Iterable[Communicator]]) -> None:
        self._others = others
        self.is_formed = self.is_aborted = False
        self.works: list[Work] = []
        self.threads: set[int] = set()

    @property
    def is_stuck(self) -> bool:
        return any(not work.has_ended and work.is_stuck for work in self.works)

    def abort(self) -> None:
        self.is_aborted = True
        end = time.monotonic() + _LONGEST_ABORT
        while any(other.is_stuck for other in self._others()):
            if time.monotonic() > end:
                _hang("an abort waits for an operation of another group")
            time.sleep(0.01)


def _hang(reason: str) -> None:
    """End this process, which would hang."""
    os.write(2, f"NotWithNccl: {reason} for ever\n".encode())
    os._exit(1)


class Work:
    """An operation on the device; `work` is that of gloo, ``None`` if this has noticed a failure already."""

    def __init__(
        self, communicator: Communicator, work: Any, results: list[torch.Tensor], *, of_all: bool = True
    ) -> None:
        self._communicator, self._work, self._results = communicator, work, results
        self._of_all = of_all
        self.is_stuck = work is None
        """Whether it never ends unless it is aborted: a peer has failed."""
        communicator.works.append(self)

    @property
    def has_ended(self) -> bool:
        """Whether the device continues behind it."""
        if self._communicator.is_aborted:
            return True
        return not self.is_stuck and (self._work is None or self._work.is_completed())

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as the device does; the host continues whatever happens."""
        if timeout is not None:
            raise NotWithNccl("Work.wait(timeout) aborts the operation when the time is over")
        while not (self.is_stuck or self._communicator.is_aborted or self._work is None):
            try:
                if not self._of_all or self._work.is_completed():
                    self._work.wait()  # sends and receipts of gloo close their connection if they time out
                    self._work = None
                    return True
                self._work.wait(_LOOK)
            except RuntimeError:  # noqa: PERF203 - it waits for seconds
                self.is_stuck = not self._of_all or self._work.is_completed()
        if self._work is not None or self.is_stuck:
            for result in self._results:
                garbage = float("nan") if result.is_floating_point() or result.is_complex() else 0x5A
                result.detach().fill_(garbage)
        return True


class Mark:
    """Stands for an event of the device."""

    def __init__(self, communicators: Iterable[Communicator]) -> None:
        self._works = [work for each in communicators for work in each.works]
        for work in self._works:
            work.wait()

    def query(self) -> bool:
        return all(work.has_ended for work in self._works)


class FakeNccl:
    """The communicators of this process."""

    def __init__(self) -> None:
        self._communicators: dict[Any, Communicator] = {}

    def of(self, group: Any) -> Communicator:
        # By the object, not its name: later groups may have the same one.
        known = lambda: list(self._communicators.values())  # noqa: E731 - short
        return self._communicators.setdefault(group or dist.group.WORLD, Communicator(known))

    def check_ended(self) -> None:
        if any(each.is_stuck for each in self._communicators.values()):
            _hang("destroy_process_group waits for an operation")

    def forget(self) -> None:
        """Drop all groups, which are kept alive, with their connections, as long as something refers to them."""
        self._communicators.clear()

    def mark(self) -> Mark:
        for communicator in self._communicators.values():
            communicator.works = [work for work in communicator.works if not work.has_ended]
        return Mark(self._communicators.values())

    def run(self, name: str, call: Any, group: Any, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
        """Give an operation to the device."""
        communicator = self.of(group)
        for tensor in tensors:
            if is_on_host(tensor):
                raise NotWithNccl(f"{name}: No backend type associated with device type cpu, with one on the GPU")
            if not tensor.is_contiguous():
                raise NotWithNccl(f"{name}: Tensors must be contiguous")
            if tensor.dtype not in _KNOWN or tensor.is_sparse:
                raise NotWithNccl(f"{name}: Input tensor data type is not supported: {tensor.dtype}")
        if not communicator.is_formed and name not in _OF_ALL:
            raise NotWithNccl(f"{name} is the first operation of a group: members that do not call it never form it")
        communicator.is_formed = True
        communicator.threads.add(threading.get_ident())
        if len(communicator.threads) > 1:
            raise NotWithNccl(f"{name}: two threads use one communicator")
        works = []
        try:
            works = call()
        except (RuntimeError, ValueError):  # its connections have ended already
            return Work(communicator, None, results)
        of_all = name in _OF_ALL
        works = works if isinstance(works, list) else [works]
        return [Work(communicator, work, results, of_all=of_all) for work in works][-1]


def install() -> None:
    """Let this thread's process have a GPU and NCCL, as far as the product's groups are concerned."""
    nccl = FakeNccl()
    Placement().__enter__()
    torch.frombuffer = _on_host(torch.frombuffer)  # which torch does not show to it
    for name in _OF_ALL:
        setattr(dist, name, _collective(nccl, name))
    originals = {name: getattr(dist, name) for name in _SINGLE}
    wrappers = {name: _single(name, originals[name]) for name in _SINGLE}
    for name, wrapper in wrappers.items():
        setattr(dist, name, wrapper)
    back = {wrappers[name]: originals[name] for name in _SINGLE}
    operation, batch = dist.P2POp, dist.batch_isend_irecv
    dist.P2POp = lambda op, *args, **kwargs: operation(back.get(op, op), *args, **kwargs)  # type: ignore[misc,assignment]

    def batched(ops: list[Any]) -> list[Any]:
        tensors = [op.tensor for op in ops]
        if not tensors or all(map(is_on_host, tensors)):
            return batch(ops)
        if any(op.tag for op in ops):
            raise NotWithNccl("batch_isend_irecv: NCCL has no tags")
        results = [op.tensor for op in ops if op.op is originals["irecv"]]
        communicator, works = nccl.of(ops[0].group), []
        last = nccl.run("batch_isend_irecv", lambda: works.extend(batch(ops)) or works, ops[0].group, tensors, results)
        return [last] if not works else communicator.works[-len(works) :]

    dist.batch_isend_irecv = batched
    destroy = dist.destroy_process_group

    def destroyed(group: Any = None) -> None:
        nccl.check_ended()
        nccl.forget()
        destroy(group)

    dist.destroy_process_group = destroyed
    gpus.backend = lambda: "cpu:gloo"
    gpus.device = lambda: torch.device("cpu")
    gpus.is_on_gpu = lambda tensor: not is_on_host(tensor)
    gpus.facts = lambda: [os.getpid(), 0]
    gpus._mark_of_now = nccl.mark
    gpus._nccl = nccl.of


def member_loop(*arguments: Any) -> None:
    """Run training jobs over it, as a process of a crew."""
    install()
    training_crew.member_loop(*arguments)


def _on_host(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = factory(*args, **kwargs)
        # Not of the memory of copies: what is received into it is not marked.
        if sys._getframe(1).f_globals["__name__"].startswith("freetrain_parsl.training.group"):
            setattr(made, _HOST, True)
        return made

    return make


def _collective(nccl: FakeNccl, name: str) -> Any:
    original = getattr(dist, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = list(tensors_in([*args, *kwargs.values()]))
        if all(map(is_on_host, tensors)):
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        results = list(tensors_in([next(iter(bound.arguments.values()))]))
        asynchronous, bound.arguments["async_op"] = bound.arguments["async_op"], True
        group = bound.arguments.get("group")
        work = nccl.run(name, lambda: original(*bound.args, **bound.kwargs), group, tensors, results)
        if asynchronous:
            return work
        work.wait()
        return None

    return call


def _single(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not all(map(is_on_host, tensors_in([*args, *kwargs.values()]))):
            raise NotWithNccl(f"{name} forms a group of two: use batch_isend_irecv")
        return original(*args, **kwargs)

    return call
