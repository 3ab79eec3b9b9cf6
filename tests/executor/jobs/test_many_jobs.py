"""A driver with many jobs keeps hearing its slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parsl.serialize import serialize

from freetrain_parsl.executor.jobs.manager import JobManager
from freetrain_parsl.protocol.reports import RunFinished

if TYPE_CHECKING:
    from tests.executor.stage import Stage


def test_messages_are_taken_while_many_jobs_are_looked_at(stage: Stage) -> None:
    for number in range(50):
        stage.submit(f"other-{number}")
    future = stage.submit()
    stage.on("n0")
    stage.progress("s0")

    def receive() -> None:
        taken.append(1)
        if len(taken) == 1:
            stage.ends("s0", RunFinished(stage.report()), serialize(8))

    taken: list[int] = []
    stage.now += JobManager._LOOK  # all are looked at again
    stage.manager.advance(receive)
    assert len(taken) == 2
    assert future.result(timeout=0) == 8
    assert stage.turn() == []
