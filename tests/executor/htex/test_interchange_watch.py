"""If HTEX's interchange dies or hangs, nothing blocks: it is replaced, or the run ends with a reason."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import zmq
from parsl.curvezmq import ClientContext

from freetrain_parsl.errors import BatchSystemError, ClusterGone
from freetrain_parsl.executor.htex.interchange_watch import (
    HtexInterchange,
    InterchangeWatch,
)
from freetrain_parsl.protocol import journal as record
from tests.executor.driver.driver_bench import wait_for
from tests.executor.scenario import make_app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FakeInterchange(HtexInterchange):
    """A process that ends, hangs and accepts tasks as set by the test."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.hangs = self.takes_nothing = self.restarts_fail = False
        self.sent: list[str] = []
        self.restarts = 0

    def why_ended(self) -> str | None:
        return self.reason

    def ask(self) -> None:
        pass

    def answered(self) -> bool:
        return not self.hangs

    def send(self, token: str) -> None:
        if self.takes_nothing:
            raise zmq.Again
        self.sent.append(token)

    def restart(self) -> None:
        if self.restarts_fail:
            raise RuntimeError("no port")
        self.restarts += 1
        self.reason, self.hangs = None, False


class _Watch(InterchangeWatch):
    _LOOK = 0.005


class _Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.interchange = FakeInterchange()
        self.posts: list[object] = []
        self.given_up: queue.Queue[str] = queue.Queue()
        self.watch = _Watch(self.interchange, self.posts.append, self.given_up.put, clock=lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        """Let time pass in steps short enough that the watch does not assume that its process was stopped."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            looked = self.watch._looked
            wait_for(lambda before=looked: self.watch._looked > before or not self.watch._thread.is_alive(), "a look")


@pytest.fixture
def scene() -> Iterator[_Scene]:
    scene = _Scene()
    scene.watch.start()
    yield scene
    scene.watch.stop()
    assert not scene.watch._thread.is_alive()


def test_a_task_that_cannot_be_sent_is_sent_later_and_nobody_waits_for_that(scene: _Scene) -> None:
    scene.interchange.takes_nothing = True
    scene.watch.submit("a")
    scene.watch.submit("b")
    scene.pass_by(3)
    assert scene.interchange.sent == []
    scene.interchange.takes_nothing = False
    wait_for(lambda: scene.interchange.sent == ["a", "b"], "the tasks")


def test_an_interchange_that_ended_is_started_again_and_its_tasks_are_left_to_the_driver(scene: _Scene) -> None:
    scene.interchange.takes_nothing = True
    scene.watch.submit("lost")
    scene.pass_by(2)
    scene.interchange.reason = "was killed by SIGKILL"
    wait_for(lambda: len(scene.posts) == 2, "a restart")
    assert scene.posts == [record.InterchangeEnded("", "was killed by SIGKILL"), record.InterchangeRestarted("")]
    scene.interchange.takes_nothing = False
    scene.watch.submit("new")
    wait_for(lambda: scene.interchange.sent, "the task")
    assert scene.interchange.sent == ["new"]


def test_an_interchange_that_hangs_is_started_again(scene: _Scene) -> None:
    scene.interchange.hangs = True
    scene.pass_by(30)
    assert scene.posts == [], "it still has time to answer"
    scene.pass_by(20)
    assert scene.interchange.restarts == 1
    assert "not answered" in scene.posts[0].reason


def test_an_interchange_is_not_taken_to_hang_because_this_process_was_stopped(scene: _Scene) -> None:
    scene.interchange.hangs = True
    scene.pass_by(15)
    looked, scene.now = scene.watch._looked, scene.now + 100.0
    wait_for(lambda: scene.watch._looked > looked, "a look")
    scene.interchange.hangs = False
    scene.pass_by(60)
    assert scene.interchange.restarts == 0


def test_one_that_ends_again_and_again_ends_the_run_with_the_reason(scene: _Scene) -> None:
    for count in range(1, 4):
        scene.interchange.reason = "ended with exit code 1"
        wait_for(lambda n=count: scene.interchange.restarts == n and len(scene.posts) == 2 * n, "a restart")
    scene.interchange.reason = "ended with exit code 1"
    assert "4 times" in scene.given_up.get(timeout=60)
    wait_for(lambda: not scene.watch._thread.is_alive(), "the end of the thread")


def test_one_that_cannot_be_started_again_ends_the_run_with_the_reason(scene: _Scene) -> None:
    scene.interchange.restarts_fail = True
    scene.interchange.reason = "was killed by SIGKILL"
    assert "no port" in scene.given_up.get(timeout=60)


@pytest.mark.cluster
def test_trainings_finish_though_the_interchange_and_all_their_processes_are_killed(start, tmp_path: Path) -> None:
    site = start(nodes=2)
    (tmp_path / "slow").touch()
    future = make_app()(epochs=8, slow=str(tmp_path / "slow"))
    site.until(lambda run: any(training.progress.get("step") for training in run.trainings.values()))
    slots = [entry.detail["pid"] for entry in entries(site, "slot_joined")]
    executor = site.executor
    os.kill(executor.interchange_proc.pid, signal.SIGKILL)
    for pid in slots:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: entries(site, "interchange_restarted"), "another interchange", 120)
    (tmp_path / "slow").unlink()
    assert future.result(timeout=240)["metrics"]["epochs"] == 8
    assert "SIGKILL" in entries(site, "interchange_ended")[0].detail["reason"]


@pytest.mark.cluster
def test_a_real_interchange_that_hangs_is_replaced_and_the_training_finishes(start, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(InterchangeWatch, "_ASK", 1.0)
    monkeypatch.setattr(InterchangeWatch, "_SILENCE", 5.0)
    site = start(nodes=1)
    (tmp_path / "slow").touch()
    future = make_app()(epochs=8, slow=str(tmp_path / "slow"))
    site.until(lambda run: any(training.progress.get("step") for training in run.trainings.values()))
    stopped = site.executor.interchange_proc
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for(lambda: entries(site, "interchange_restarted"), "another interchange", 120)
    assert stopped.poll() is not None, "the one that hung is gone"
    (tmp_path / "slow").unlink()
    assert future.result(timeout=240)["metrics"]["epochs"] == 8
    assert "not answered" in entries(site, "interchange_ended")[0].detail["reason"]


@pytest.mark.cluster
def test_a_training_whose_process_dies_when_no_further_block_is_submitted_goes_on_in_its_own(start, tmp_path) -> None:
    """Regression: HTEX refused the slot's replacement, with an exception that ended the watch."""
    site = start(nodes=1)
    executor = site.executor
    (tmp_path / "slow").touch()
    future = make_app()(epochs=8, slow=str(tmp_path / "slow"))
    site.until(lambda run: any(training.progress.get("step") for training in run.trainings.values()))
    refusal = BatchSystemError("no further block")
    executor._refuse_new(refusal)
    with pytest.raises(BatchSystemError, match="no further block"):
        make_app().options(name="late")(epochs=1).result(timeout=60)
    os.kill(entries(site, "slot_joined")[0].detail["pid"], signal.SIGKILL)
    wait_for(lambda: len(entries(site, "slot_joined")) == 2, "another slot", 120)
    (tmp_path / "slow").unlink()
    assert future.result(timeout=240)["metrics"]["epochs"] == 8
    executor._fail_all(refusal)
    executor._watch.submit("late")
    wait_for(executor._watch._tasks.empty, "the watch", 20)
    executor._watch._thread.join(1.0)
    assert executor._watch._thread.is_alive()


@pytest.mark.cluster
def test_a_worker_pool_that_connects_again_is_answered_though_its_first_connection_is_still_open(start) -> None:
    """A pool connects twice under one name: it tries the addresses first, and does not wait until that has closed."""
    executor = start(nodes=1).executor
    context = ClientContext(executor.cert_dir)
    with contextlib.ExitStack() as stack:
        stack.callback(context.term)
        for _ in range(2):
            pool = stack.enter_context(context.socket(zmq.DEALER))
            pool.setsockopt(zmq.LINGER, 0)
            pool.setsockopt(zmq.IDENTITY, b"a pool")
            pool.connect(f"tcp://127.0.0.1:{executor.worker_port}")
            pool.send(pickle.dumps({"type": "connection_probe"}))
            assert pool.poll(20_000), "no answer"


@pytest.mark.cluster
def test_a_batch_system_that_has_ended_is_told_at_once(start, tmp_path: Path) -> None:
    site = start(nodes=1)
    (tmp_path / "slow").touch()
    future = make_app()(epochs=100, slow=str(tmp_path / "slow"))
    site.until(lambda run: run.blocks_requested)
    site.executor.provider._connection.own._process.kill()
    with pytest.raises(ClusterGone, match="has ended"):
        future.result(timeout=60)


def entries(site, kind: str) -> list:
    from freetrain_parsl.executor.journal import read_journal

    return [entry for _, entry in read_journal(site.executor.journal_path) if entry.kind == kind]


_MODULE = """
import multiprocessing, time
from freetrain_parsl.executor.driver.clock import SteadyClock

def is_steady(answers):
    answers.put(isinstance(time.time, SteadyClock))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    is_steady(answers)
    print(answers.get())
    process = context.Process(target=is_steady, args=(answers,))
    process.start()
    print(answers.get())
    process.join()
"""


_STEADILY = "from freetrain_parsl.executor.htex.worker_pool import run_steadily; run_steadily('a_program')"


def test_htex_goes_by_a_steady_clock_and_its_workers_by_the_wall_clock(tmp_path: Path) -> None:
    (tmp_path / "a_program.py").write_text(_MODULE)
    done = subprocess.run(
        [sys.executable, "-c", _STEADILY],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"]
