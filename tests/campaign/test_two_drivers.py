"""Two drivers of one run: the newest one drives it, and an earlier one that continues changes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import DriverSuperseded, InvalidInput
from tests.campaign.cluster_shell import BOTH_RUN, EPOCHS, SAMPLES

if TYPE_CHECKING:
    from tests.campaign.cluster_shell import ClusterShell

ANOTHER_HOST = Path(__file__).with_name("another_host.py")


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path, {"name": "c", "run_id": "r", "created": 1.0}, ["a", "b"])


def test_all_that_a_replaced_driver_writes_is_refused(store: RunStore) -> None:
    first, second = RunStore(store.directory), RunStore(store.directory)
    old = first.begin_driver("login1", 1, 1)
    first.beat(old, {"a": ("running", 0.5, ("n1",))})
    new = second.begin_driver("login2", 2, 1, replaces=store.last_driver())
    second.describe_driver(new, "freetrain.x.", Path("/j"))
    second.beat(new, {"a": ("running", 0.6, ("n2",)), "b": ("running", 0.1, ("n3",))})
    before = store.trainings(), store.drivers()
    for write in (
        lambda: first.describe_driver(old, "freetrain.y.", Path("/k")),
        lambda: first.beat(old, {"a": ("waiting", 0.9, ())}),
        lambda: first.finish("a", 1),
        lambda: first.fail("a", "CheckpointError: another process has taken over", final=True),
        lambda: first.cancel("a"),
        lambda: first.end_driver(old, "interrupted"),
        first.check_driver,
    ):
        with pytest.raises(DriverSuperseded, match="was replaced by process 2 on login2, which continues the run"):
            write()
    assert (store.trainings(), store.drivers()) == before
    second.finish("a", 1)
    second.end_driver(new, "finished")
    assert [item.state for item in store.trainings()] == ["finished", "waiting"]


def test_a_driver_is_replaced_only_as_it_was_when_it_was_found_dead(store: RunStore) -> None:
    """Of two commands that find a dead driver at the same time, one continues the run."""
    number = store.begin_driver("login1", 1, 1)
    found = store.last_driver()
    store.beat(number, {})
    with pytest.raises(InvalidInput, match=r"its driver runs on login1 \(process 1\)"):
        RunStore(store.directory).begin_driver("login2", 2, 1, replaces=found)
    found = store.last_driver()
    RunStore(store.directory).begin_driver("login2", 2, 1, replaces=found)
    with pytest.raises(InvalidInput, match=r"its driver runs on login2 \(process 2\)"):
        RunStore(store.directory).begin_driver("login3", 3, 1, replaces=found)
    assert [driver.host for driver in store.drivers()] == ["login1", "login2"]


def test_the_outcome_of_a_training_that_has_ended_stays(store: RunStore) -> None:
    store.finish("a", 1)
    store.fail("b", "ValueError: wrong", final=True)
    store.fail("a", "late", final=True)
    store.finish("b", 2)
    assert [(item.state, item.result, item.error) for item in store.trainings()] == [
        ("finished", 1, None),
        ("failed", None, "ValueError: wrong"),
    ]


@pytest.mark.cluster
def test_a_suspended_driver_that_continues_leaves_the_run_to_its_replacement(shell: ClusterShell) -> None:
    shell.slow.touch()
    first = shell.start_campaign()
    shell.until(BOTH_RUN, first)
    first.send_signal(signal.SIGSTOP)
    try:
        second = subprocess.Popen(
            [sys.executable, str(ANOTHER_HOST), "resume", "run"],
            cwd=shell.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            running = "SELECT 1 FROM driver WHERE id = 2 AND journal IS NOT NULL"
            shell.until(running, second)
            shell.until("SELECT 1 FROM training WHERE state = 'running'", second)
        finally:
            first.send_signal(signal.SIGCONT)
        _, told = first.communicate(timeout=60)
        assert first.returncode == 1, told
        assert "was replaced by process" in told.splitlines()[-1]
        assert "Traceback" not in told
        shell.slow.unlink()
        out, _ = second.communicate(timeout=240)
        assert second.returncode == 0, out
    finally:
        second.kill()
        second.wait()
    shell.check_results([EPOCHS * SAMPLES] * 2, resumed=True)
    assert shell.nothing_left_within(60), (shell.left(), shell.jobs())
