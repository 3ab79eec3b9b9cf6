"""Training jobs of a run start, stop and count as the mover says."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from freetrain_parsl.campaign.owned_trainings import OwnedTrainings
from freetrain_parsl.errors import TrainingCancelled
from freetrain_parsl.storage.home import ResultStatus
from tests.clock import Clock


class ScriptedMover:
    """Says what a test has set."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.losses: dict[str, str] = {}
        self.verdicts: dict[str, ResultStatus] = {}
        self.told: list[str] = []
        self.settled = True
        self.copying: set[str] = set()

    def want(self, trainings: Any) -> None:
        self.told.append(f"want {', '.join(trainings)}")

    def abandon(self, trainings: Any) -> None:
        self.told += [f"abandon {name}" for name in sorted(trainings)]

    def leave(self, training: str) -> None:
        self.told.append(f"leave {training}")

    def has_left(self, training: str) -> bool:
        return training not in self.copying

    def is_ready(self, training: str) -> bool:
        return training in self.ready

    def lost(self, training: str) -> str:
        return self.losses.get(training, "")

    def stopped(self, training: str) -> None:
        self.told.append(f"stopped {training}")
        self.losses.pop(training)

    def finished(self, training: str) -> ResultStatus:
        return self.verdicts.get(training, ResultStatus.PENDING)

    def remark(self, training: str) -> str:
        return "another site owns it"

    def lines(self) -> list[str]:
        return []


class Kernel:
    """Submits training jobs and cancels them at once."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    @staticmethod
    def cancel(future: Future[Any]) -> bool:
        future.set_exception(TrainingCancelled("cancelled"))
        return True


def collected(admission: OwnedTrainings) -> list[str]:
    names: list[str] = []
    admission.collect(lambda name, _future: names.append(name))
    return names


def test_without_a_home_all_trainings_start_and_every_outcome_counts() -> None:
    kernel = Kernel()
    admission = OwnedTrainings({"a": kernel.submit, "b": kernel.submit}, kernel.cancel)
    admission.admit()
    assert admission.current == {"a", "b"}
    kernel.futures[0].set_result(1)
    assert collected(admission) == ["a"]
    kernel.futures[1].set_exception(ValueError())
    assert collected(admission) == ["b"]
    assert admission.is_done


def test_a_training_starts_only_once_this_site_owns_it() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    admission = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover)
    admission.admit()
    assert kernel.futures == []
    assert admission.notes() == ["a waits: another site owns it"]
    mover.ready.add("a")
    admission.admit()
    assert len(kernel.futures) == 1
    assert not admission.is_done


def test_a_training_that_another_site_has_taken_over_is_ended_and_held_until_it_is_owned_again() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    admission = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover)
    mover.ready.add("a")
    admission.admit()
    mover.ready.clear()
    mover.losses["a"] = "another site has taken it over"
    admission.admit()
    assert kernel.futures[0].done()
    assert collected(admission) == []
    assert mover.told == ["want a", "stopped a"]
    assert admission.held == {"a"}
    mover.ready.add("a")
    admission.admit()
    kernel.futures[1].set_result(1)
    mover.verdicts["a"] = ResultStatus.CONFIRMED
    assert collected(admission) == ["a"]


def test_a_result_is_kept_once_home_has_confirmed_it_and_dropped_if_another_site_goes_on() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    admission = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover)
    mover.ready.add("a")
    admission.admit()
    kernel.futures[0].set_result(1)
    assert collected(admission) == []
    mover.verdicts["a"], mover.losses["a"] = ResultStatus.LOST, "another site has taken it over"
    assert collected(admission) == []
    assert admission.held == {"a"}


def test_the_run_waits_for_the_last_copies_and_a_held_training_can_be_cancelled() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    admission = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover)
    assert admission.cancel("a")
    mover.settled = False
    assert not admission.is_done
    mover.settled = True
    assert admission.is_done


def test_a_withdrawn_training_is_saved_and_leaves_and_comes_back_only_once_it_has_left() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    mover.ready = {"a", "b"}
    trainings = OwnedTrainings({"a": kernel.submit, "b": kernel.submit}, kernel.cancel, mover, assigned=["a"])
    trainings.admit()
    assert (trainings.current, trainings.elsewhere) == ({"a"}, {"b"})
    mover.copying = {"a"}
    trainings.assign(["b"])
    assert collected(trainings) == []  # its cancellation is no outcome
    trainings.admit()
    assert (trainings.current, trainings.elsewhere) == ({"b"}, {"a"})
    trainings.assign(["a", "b"])  # its last checkpoint is still being copied
    trainings.admit()
    assert trainings.current == {"b"}
    mover.copying.clear()
    trainings.assign(["a", "b"])
    trainings.admit()
    assert trainings.current == {"a", "b"}
    assert mover.told == ["want a", "abandon b", "want b", "leave a", "want a"]


def test_a_training_that_finishes_while_it_is_withdrawn_has_its_result() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    mover.ready, mover.verdicts = {"a"}, {"a": ResultStatus.CONFIRMED}
    slow = OwnedTrainings({"a": kernel.submit}, lambda _: True, mover, assigned=["a"])
    slow.admit()
    slow.assign([])
    kernel.futures[0].set_result(1)
    assert collected(slow) == ["a"]
    assert slow.is_done


def test_a_run_to_which_nothing_is_assigned_is_done() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    trainings = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover, assigned=["a"])
    trainings.assign([])
    assert trainings.is_done
    assert mover.told[-1] == "leave a"


def test_a_training_that_is_withdrawn_and_lost_has_a_result_when_it_comes_back() -> None:
    kernel, mover = Kernel(), ScriptedMover()
    mover.ready = {"a"}
    trainings = OwnedTrainings({"a": kernel.submit}, kernel.cancel, mover, assigned=["a"])
    trainings.admit()
    trainings.assign([])
    mover.losses = {"a": "home could not be reached"}
    trainings.admit()
    assert collected(trainings) == []
    mover.losses = {}
    trainings.assign(["a"])
    trainings.admit()
    mover.verdicts = {"a": ResultStatus.CONFIRMED}
    kernel.futures[1].set_result(1)
    assert collected(trainings) == ["a"]


def test_a_training_that_cannot_be_submitted_fails_and_the_others_go_on() -> None:
    kernel = Kernel()

    def refused() -> Future[Any]:
        raise TypeError("train() has no parameter 'lr'")

    owned = OwnedTrainings({"a": refused, "b": Future}, kernel.cancel)
    owned.admit()
    kept: dict[str, BaseException | None] = {}
    owned.collect(lambda name, future: kept.update({name: future.exception()}))
    assert str(kept["a"]) == "train() has no parameter 'lr'"
    assert owned.current == {"b"}


def test_of_many_trainings_some_are_left_for_the_next_call() -> None:
    """The driver's heartbeat must not wait until thousands are submitted."""
    clock = Clock()

    def submit() -> Future[Any]:
        clock.sleep(0.3)
        return Future()

    trainings = OwnedTrainings({f"t{number}": submit for number in range(10)}, clock=clock)
    sizes = []
    while trainings.held:
        trainings.admit()
        sizes.append(len(trainings.current))
    assert sizes == [4, 8, 10]
