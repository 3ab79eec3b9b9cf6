"""What ends the control loop, and what does not: its channel and its job submitter are the test's."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.errors import TrainingInterrupted
from freetrain_parsl.planning.settings import PlannerSettings
from freetrain_parsl.protocol.messages import Output, Values
from tests.executor.driver.simulated_site import SimulatedSite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


@pytest.fixture
def site(tmp_path: Path) -> Iterator[SimulatedSite]:
    simulated = SimulatedSite(tmp_path, (), (), PlannerSettings().in_seconds(), start_delay=1.0)
    with closing(simulated.journal):
        yield simulated


def test_whatever_ends_the_loop_fails_what_is_not_done(site: SimulatedSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``sys.exit`` in code of the user's, the futures stayed pending."""
    failures: list[Exception] = []

    def receive(_timeout: float) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(site, "receive", receive)
    monkeypatch.setattr(site.loop, "_fail_all", failures.append)
    site.loop.run()
    assert isinstance(failures[0], TrainingInterrupted)
    assert "the driver of the FreeTrain executor failed: SystemExit: 3" in str(failures[0])


def test_output_and_values_that_cannot_be_handled_do_not_end_the_loop(
    site: SimulatedSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nameless(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail(*_: str | bytes | Sequence[str]) -> None:
        raise Nameless

    monkeypatch.setattr(site.loop, "_take_output", fail)
    monkeypatch.setattr(site.loop, "_take_values", fail)
    site.inbox += [("s", Output("t", "0", b"text\n")), ("s", Values("t", ("{}",)))]
    site.loop._turn()
    assert not site.inbox
