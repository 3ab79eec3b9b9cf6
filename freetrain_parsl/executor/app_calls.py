"""Calls of training apps, as Parsl keeps them: to cancel one before Parsl has launched it.

Parsl has one thread that passes calls to executors, in order, and a call that waits for the results of others does not
reach an executor at all. All that is known of such a call is the record in its future.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsl.dataflow.states import States

from freetrain_parsl.executor.jobs.request import SPECIFICATION_KEY

if TYPE_CHECKING:
    from parsl.dataflow.futures import AppFuture
    from parsl.dataflow.taskrecord import TaskRecord
    from parsl.executors.base import ParslExecutor

    from freetrain_parsl.executor.jobs.request import TrainingRequest

__all__ = ["call_off", "request_of"]


def request_of(future: AppFuture, executor: ParslExecutor) -> TrainingRequest | None:
    """Return the request of a training app's call; ``None`` if it is no training, or another executor's."""
    record = future.task_record
    if record["dfk"].executors.get(record["executor"]) is not executor:
        return None
    request: TrainingRequest | None = record["resource_specification"].get(SPECIFICATION_KEY)
    return request


def call_off(future: AppFuture) -> bool:
    """Let Parsl launch a call soon that still waits for its arguments, without them; the executor is to refuse it.

    Returns
    -------
    bool
        False if the call is never launched, since Parsl was cleaned up.
    """
    record = future.task_record
    record["memoize"] = False  # else a later call would get the refusal from Parsl's cache
    if not _waits(record):
        return True
    with record["task_launch_lock"]:  # held for long only while the call is being launched
        if not _waits(record):
            return True
        record["args"], record["kwargs"], record["depends"] = (), {}, []
    try:
        record["dfk"].launch_if_ready(record)
    except RuntimeError:  # Parsl's queue is closed
        return False
    return True


def _waits(record: TaskRecord) -> bool:
    """Return whether a call waits for its arguments; else it was launched, or is in Parsl's queue."""
    return record["status"] is States.pending and not all(one.done() for one in record["depends"])
