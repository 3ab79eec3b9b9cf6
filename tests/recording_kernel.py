"""A fake of Parsl's DataFlowKernel that records the calls of training apps."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parsl.dataflow.dflow import DataFlowKernel

from freetrain_parsl import FreeTrainExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.executor.jobs.request import TrainingRequest


@dataclass(frozen=True)
class Call:
    """One submitted training job."""

    request: TrainingRequest
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RecordingKernel(DataFlowKernel):
    """Records submissions; their futures are done at once.

    Parameters
    ----------
    answer
        Returns the result of a call, or raises its error.
    """

    def __init__(self, answer: Callable[[Call], Any] = lambda call: None) -> None:
        self.calls: list[Call] = []
        self.executors = {"freetrain": object.__new__(FreeTrainExecutor)}
        self._answer = answer

    @property
    def requests(self) -> list[TrainingRequest]:
        return [call.request for call in self.calls]

    def submit(self, _function, app_args, app_kwargs, **_others) -> Future[Any]:
        kwargs = dict(app_kwargs)
        call = Call(kwargs.pop("parsl_resource_specification")["freetrain"], app_args, kwargs)
        self.calls.append(call)
        future: Future[Any] = Future()
        try:
            future.set_result(self._answer(call))
        except Exception as error:  # noqa: BLE001 - the future's
            future.set_exception(error)
        return future
