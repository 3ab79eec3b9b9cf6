"""One training job can be cancelled, and every future is resolved, however the run ends."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING

import parsl
import pytest
from parsl.dataflow.memoization import id_for_memo

from freetrain_parsl import training_app
from freetrain_parsl.errors import TrainingCancelled, TrainingInterrupted
from freetrain_parsl.executor.driver.loop import CancelTraining
from freetrain_parsl.executor.driver.settler import unshared
from freetrain_parsl.executor.submissions import Submissions
from freetrain_parsl.protocol.messages import PauseRun, StartRun
from tests.executor.driver.driver_bench import DriverBench, wait_for
from tests.executor.scenario import make_app

if TYPE_CHECKING:
    from tests.executor.stage import Stage


def test_a_training_that_runs_is_paused_then_ends_and_its_node_goes_to_another(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        first, other, waiting = (bench.train(name) for name in ("first", "other", "waiting"))
        slots = [bench.slot(), bench.slot()]
        runs = {slot.get(StartRun).training: slot for slot in slots}
        assert len(runs) == 2
        name, slot = next(iter(runs.items()))
        slot.progress(1)
        future = {"first": first, "other": other, "waiting": waiting}[name]
        bench.driver.post(CancelTraining(future))
        slot.get(PauseRun)
        assert not future.done(), "its state is not saved yet"
        slot.pause()
        with pytest.raises(TrainingCancelled, match=name):
            future.result(60)
        assert slot.get(StartRun).training not in runs
        kinds = [entry.kind for entry in bench.history() if entry.subject == name]
        assert "training_cancelled" in kinds
        assert "training_failed" not in kinds


def test_a_training_that_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        future = bench.train("t")
        bench.driver.post(CancelTraining(future))
        with pytest.raises(CancelledError):
            future.result(60)


def test_a_training_that_finishes_while_it_is_being_cancelled_keeps_its_result(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        future = bench.train("t")
        slot = bench.slot()
        slot.get(StartRun)
        slot.progress(1)
        bench.driver.post(CancelTraining(future))
        slot.get(PauseRun)
        slot.finish("result")
        assert future.result(60) == "result"


def test_a_training_that_is_lost_while_it_is_being_cancelled_ends_too(tmp_path: Path) -> None:
    with DriverBench(tmp_path) as bench:
        future = bench.train("t")
        slot = bench.slot()
        slot.get(StartRun)
        bench.driver.post(CancelTraining(future))
        slot.get(PauseRun)
        slot.die()
        with pytest.raises(TrainingCancelled):
            future.result(60)


def test_futures_that_fail_together_share_no_traceback(stage: Stage) -> None:
    """Each `result()` makes the traceback of what it raises longer, and Parsl logs it: with 10,000, of 500 MB."""
    submissions = Submissions()
    tasks = [submissions.add_task(b"").future for _ in range(3)]
    submissions.fail_all(TrainingInterrupted("why"))
    trainings = [stage.submit(name) for name in ("a", "b", "c")]
    stage.manager.fail_all(TrainingInterrupted("why"))
    for futures in (tasks, trainings):
        for future in futures:
            with pytest.raises(TrainingInterrupted, match=r"^why$"):
                future.result(60)
        assert len({id(future.exception()) for future in futures}) == 3


def test_a_reason_that_cannot_be_copied_is_shared() -> None:
    class Awkward(Exception):
        def __init__(self, first: str, second: str) -> None:
            super().__init__(f"{first} {second}")

    error = Awkward("a", "b")
    assert unshared(error) is error


def test_the_drivers_own_failure_is_told_apart_from_a_trainings(tmp_path: Path) -> None:
    """Callers that rerun training jobs must know which of them were not at fault."""
    with DriverBench(tmp_path) as bench:
        future = bench.train("t")
        bench.driver._planner.advance = None  # a bug
        with pytest.raises(TrainingInterrupted, match="driver"):
            future.result(60)
        assert TrainingInterrupted.transient


@pytest.mark.cluster
def test_cancelling_keeps_the_checkpoint_and_neither_retries_nor_shutdown_bring_it_back(start, tmp_path: Path) -> None:
    site = start(nodes=1)
    parsl.dfk()._config.retries = 2
    (tmp_path / "slow").touch()
    train = make_app()
    future = train.options(name="t")(epochs=50, slow=str(tmp_path / "slow"))
    site.until(lambda run: run.trainings["t"].progress.get("step", 0) > 5 if "t" in run.trainings else False)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(site.executor.cancel(future)))
    thread.start()
    thread.join(10)
    assert answers == [True]
    with pytest.raises(CancelledError):
        future.result(timeout=240)
    assert site.run.trainings["t"].state == "cancelled"
    assert not site.executor.cancel(future), "it is over"
    assert not site.executor.cancel(Future()), "not a training job of this executor"
    step = site.run.trainings["t"].progress["step"]
    (tmp_path / "slow").unlink()
    again = train.options(name="t")(epochs=2, slow=str(tmp_path / "slow"))
    assert again.result(timeout=240)["metrics"]["epochs"] == 2
    assert site.run.fragments[-1].resumed_from >= step - 1


class Held:
    """An argument that can only be pickled, and its call only be launched, once it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.begun.set()
        assert self.released.wait(60)
        return int, ()


@pytest.mark.cluster
def test_a_call_is_cancelled_whatever_parsl_has_done_with_it(start, tmp_path: Path) -> None:
    """Parsl launches one call after another, and not before its arguments are known."""
    site = start(nodes=1)
    parsl.dfk()._config.retries = 2
    id_for_memo.register(Held, lambda _held, output_ref=False: b"held")
    ran = str(tmp_path / "ran")

    @training_app(cache=True)
    def note(session, ran, argument):
        with Path(ran).open("a") as file:
            file.write(f"{argument} ")

    never: Future[int] = Future()
    waiting = note.options(name="waiting")(ran, never)
    assert site.executor.cancel(waiting)
    with pytest.raises(TrainingCancelled, match="waiting"):
        waiting.result(60)

    held = Held()
    launched = note.options(name="launched")(ran, held)
    assert held.begun.wait(60)
    queued = note.options(name="queued")(ran, 1)
    assert [site.executor.cancel(each) for each in (launched, queued, queued)] == [True, True, True]
    assert [each.done() for each in (launched, queued)] == [False, False], "Parsl's thread stands"
    held.released.set()
    for future, name in ((launched, "launched"), (queued, "queued")):
        with pytest.raises(TrainingCancelled, match=name):
            future.result(60)
        assert not site.executor.cancel(future), "it is over"

    note.options(name="queued")(ran, 1).result(240)
    assert Path(ran).read_text() == "1 "
    late = note.options(name="late")(ran, never)
    parsl.dfk().cleanup()
    assert not site.executor.cancel(late), "Parsl launches nothing more"


@pytest.mark.cluster
def test_a_future_is_resolved_when_the_kernel_is_cleaned_up(start, tmp_path: Path) -> None:
    site = start(nodes=1)
    (tmp_path / "slow").touch()
    future = make_app()(epochs=100, slow=str(tmp_path / "slow"))
    site.until(lambda run: run.fragments)
    parsl.dfk().cleanup()
    assert wait_for(future.done, "an answer", 10)
    with pytest.raises(TrainingInterrupted, match="shut down"):
        future.result()
