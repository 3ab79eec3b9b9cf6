"""The journal has how often commands of the batch system were run, also of a run that ends within minutes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from freetrain_parsl.protocol.messages import StartRun
from freetrain_parsl.windows.commands import COMMAND_COUNTS, Commands
from tests.executor.driver.driver_bench import DriverBench

if TYPE_CHECKING:
    from pathlib import Path


def test_requests_are_in_the_journal_at_the_end(tmp_path: Path) -> None:
    COMMAND_COUNTS.take()
    with DriverBench(tmp_path) as bench:
        future = bench.train("one")
        slot = bench.slot()
        slot.get(StartRun)
        for _ in range(3):
            Commands()("true")
        slot.finish("done")
        assert future.result(60) == "done"
    (entry,) = (entry for entry in bench.history() if entry.kind == "batch_requests")
    assert entry.detail["counts"] == {"true": 3}
    assert 0 < entry.detail["seconds"] < 60
