"""A study's trials as training jobs: over a fake kernel, on a real embedded cluster, and after a kill of the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import pytest
from optuna.trial import TrialState

from freetrain_parsl import FreeTrainExecutor, read_journal, training_app
from freetrain_parsl.errors import InvalidApp, TrainingInterrupted
from freetrain_parsl.extensions.integrations.optuna import optimize
from tests.recording_kernel import Call, RecordingKernel

if TYPE_CHECKING:
    from concurrent.futures import Future

ROOT = Path(__file__).parents[3]


def row(epoch: int | None, **values: object) -> str:
    step = 8 * (epoch or 0)
    return json.dumps({"step": step, "epoch": epoch, "time": 1.0, "values": values})


class FakeExecutor(FreeTrainExecutor):
    """Passes on the rows that a test gives it, and notes what is cancelled."""

    def __init__(self) -> None:
        self._observers = {}
        self.cancelled: list[Future] = []

    def cancel(self, future: Future) -> bool:
        self.cancelled.append(future)
        return True


class LoggingKernel(RecordingKernel):
    """Training jobs that log as soon as they are submitted; those that are cancelled do not end by themselves."""

    def __init__(self, rows, answer=lambda call: None) -> None:
        super().__init__(answer)
        self.executor = FakeExecutor()
        self.executors = {"freetrain": self.executor}
        self._rows = rows
        self.most = 0

    def submit(self, function, app_args, app_kwargs, **others):
        request = app_kwargs["parsl_resource_specification"]["freetrain"]
        self.executor._observers[request.name](self._rows(Call(request, app_args, app_kwargs)))
        self.most = max(self.most, len(self.executor._observers))
        return super().submit(function, app_args, app_kwargs, **others)


def train(session, lr, width=16): ...


def losses(call: Call) -> list[str]:
    """Return the rows of a training job whose loss after three epochs is its learning rate."""
    return [row(epoch, loss=call.kwargs["lr"] + 2 - epoch) for epoch in range(3)]


def suggest(trial):
    return {"lr": trial.suggest_float("lr", 0.0, 1.0)}


def search(rows=losses, answer=lambda call: None, study=None, n_trials=6, **settings):
    kernel = LoggingKernel(rows, answer)
    if study is None:
        study = optuna.create_study(
            study_name="net", sampler=optuna.samplers.RandomSampler(seed=1), pruner=optuna.pruners.NopPruner()
        )
    optimize(study, training_app(data_flow_kernel=kernel)(train), suggest, n_trials=n_trials, **settings)
    assert not kernel.executor._observers
    return study, kernel


def test_the_last_logged_value_is_that_of_the_trial_and_all_are_reported() -> None:
    study, kernel = search()
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 6
    for trial, call in zip(study.trials, kernel.calls, strict=True):
        assert trial.value == pytest.approx(call.kwargs["lr"])
        assert list(trial.intermediate_values) == [0, 1, 2]
        assert call.request.name == trial.user_attrs["freetrain:training"]
    assert study.best_value == pytest.approx(min(call.kwargs["lr"] for call in kernel.calls))


def test_no_more_than_n_jobs_run_at_a_time_and_n_trials_count_those_of_earlier_calls() -> None:
    study, kernel = search(n_jobs=2)
    assert kernel.most == 2
    again, kernel = search(study=study, n_trials=8)
    assert (len(again.trials), len(kernel.calls)) == (8, 2)
    _, kernel = search(study=study, n_trials=8)
    assert not kernel.calls


def test_a_trial_that_the_pruner_gives_up_is_cancelled_and_not_failed() -> None:
    told = []
    study = optuna.create_study(study_name="net", pruner=optuna.pruners.ThresholdPruner(upper=2.5))
    study.enqueue_trial({"lr": 0.25})
    study.enqueue_trial({"lr": 0.75})
    _, kernel = search(study=study, n_trials=2, on_trial=told.append)
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert study.trials[1].value == 2.75
    assert len(kernel.executor.cancelled) == 1
    assert [trial.number for trial in told] == [0, 1]


def test_a_study_that_maximizes_another_metric() -> None:
    study = optuna.create_study(direction="maximize")
    search(lambda call: [row(0, loss=1.0, accuracy=call.kwargs["lr"])], study=study, metric="accuracy")
    assert study.best_value == max(trial.params["lr"] for trial in study.trials)


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, loss=1.0), row(0, loss=1.0)],  # again by a process that has resumed
        [row(0, loss=1.0), row(None, loss=7.0)],  # of a step
        ["", "{}", "[]", row(0, loss="low"), row(-1, loss=3.0), row(0, loss=1.0), row(0, accuracy=2.0)],
    ],
)
def test_only_values_of_epochs_are_reported_each_once(rows) -> None:
    study, _ = search(lambda call: rows, n_trials=1)
    assert study.trials[0].intermediate_values == {0: 1.0}
    assert study.trials[0].value == 1.0


def test_a_training_that_raises_fails_its_trial_only() -> None:
    def answer(call):
        if call.kwargs["lr"] < 0.3:
            raise ValueError("too small")

    study, _ = search(answer=answer)
    small = [trial for trial in study.trials if trial.params["lr"] < 0.3]
    assert small
    assert {trial.state for trial in small} == {TrialState.FAIL}
    assert small[0].user_attrs["freetrain:error"] == "ValueError: too small"
    assert len(study.get_trials(states=[TrialState.COMPLETE])) == 6 - len(small)


@pytest.mark.parametrize(("rows", "why"), [([], "was not logged"), ([row(0, loss=float("nan"))], "is NaN")])
def test_a_trial_without_a_value_fails_with_the_reason(rows, why) -> None:
    study, _ = search(lambda call: rows, n_trials=1)
    assert study.trials[0].state == TrialState.FAIL
    assert why in study.trials[0].user_attrs["freetrain:error"]


def test_trials_go_on_under_their_names_after_the_run_has_failed() -> None:
    """What is not a trial's fault leaves it running, and the next call continues it with the same arguments."""

    def answer(call):
        raise TrainingInterrupted("the run ended")

    study = optuna.create_study(study_name="net", pruner=optuna.pruners.NopPruner())
    with pytest.raises(TrainingInterrupted):
        search(lambda call: losses(call)[:1], answer, study=study, n_trials=3)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 3
    before = [(trial.params, trial.user_attrs["freetrain:training"]) for trial in study.trials]
    _, kernel = search(study=study, n_trials=3)
    assert [({"lr": call.kwargs["lr"]}, call.request.name) for call in kernel.calls] == before
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    assert all(list(trial.intermediate_values) == [0, 1, 2] for trial in study.trials)


def test_trials_of_others_are_left_alone() -> None:
    study = optuna.create_study(study_name="net")
    study.ask()
    _, kernel = search(study=study, n_trials=2)
    assert len(kernel.calls) == 1
    assert study.trials[0].state == TrialState.RUNNING


def test_a_study_that_another_process_optimizes_is_refused() -> None:
    study = optuna.create_study(study_name="net")
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        study.ask().set_user_attr("freetrain:driver", [os.uname().nodename, process.pid, started])
        with pytest.raises(InvalidApp, match=f"process {process.pid} .* is optimizing study 'net'"):
            search(study=study)
    finally:
        process.kill()
        process.wait()
    _, kernel = search(study=study, n_trials=1)
    assert len(kernel.calls) == 1


def test_trainings_of_two_studies_of_one_name_do_not_share_checkpoints() -> None:
    names = [call.request.name for _ in range(2) for call in search(study=_random("a/b"), n_trials=2)[1].calls]
    assert len(set(names)) == 4
    assert all(name.startswith("a_b-") for name in names)


def _random(name: str):
    return optuna.create_study(study_name=name)


@pytest.mark.parametrize("bad", [{"n_trials": 0}, {"n_jobs": 0}, {"n_trials": True}])
def test_numbers_out_of_range_are_refused_before_a_trial_begins(bad) -> None:
    study = optuna.create_study()
    with pytest.raises(InvalidApp, match="optimize: n_"):
        search(study=study, **bad)
    assert not study.trials


def test_several_directions_are_refused() -> None:
    with pytest.raises(InvalidApp, match="2 directions"):
        search(study=optuna.create_study(directions=["minimize", "maximize"]))


def test_arguments_that_the_function_does_not_have_are_the_callers_mistake() -> None:
    study = optuna.create_study()
    kernel = LoggingKernel(losses)
    with pytest.raises(TypeError, match="depth"):
        optimize(study, training_app(data_flow_kernel=kernel)(train), lambda trial: {"lr": 0.1, "depth": 1}, n_trials=3)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]
    assert not kernel.calls


def test_suggest_may_prune() -> None:
    study = optuna.create_study()

    def nothing(trial):
        raise optuna.TrialPruned

    optimize(study, training_app(data_flow_kernel=LoggingKernel(losses))(train), nothing, n_trials=2)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * 2


@pytest.mark.cluster
@pytest.mark.parametrize("fuse", [False, "auto"])
def test_pruned_trials_leave_their_nodes_at_once(start, fuse) -> None:
    """The nodes of bad trials go to others long before these trials would have ended."""
    site = start(nodes=2)

    @training_app(fuse=fuse)
    def regress(session, bad):
        import time

        import torch

        x = torch.randn(64, 4)
        model, _ = session.prepare(torch.nn.Linear(4, 1), torch.optim.SGD, lr=0.1)
        data = session.loader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
        for epoch in session.epochs(400 if bad else 4):
            for inputs, targets in data:
                time.sleep(0.05)
                session.step(torch.nn.functional.mse_loss(model(inputs), targets))
            session.log(error=2.0 if bad else 1 / (epoch + 1))
        return session.metrics

    study = optuna.create_study(study_name="net", pruner=optuna.pruners.ThresholdPruner(upper=1.5))
    for bad in (True, True, False, False):
        study.enqueue_trial({"bad": bad})
    began = time.monotonic()
    optimize(
        study,
        regress,
        lambda trial: {"bad": trial.suggest_categorical("bad", [True, False])},
        metric="error",
        n_trials=4,
        n_jobs=2 if fuse is False else 4,
    )
    assert time.monotonic() - began < 75, "a bad trial has 80 s of steps"
    assert [trial.state.name for trial in study.trials] == ["PRUNED"] * 2 + ["COMPLETE"] * 2
    assert [trial.value for trial in study.trials] == [2.0, 2.0, 0.25, 0.25]
    names = [trial.user_attrs["freetrain:training"] for trial in study.trials]
    states = ["cancelled", "cancelled", "finished", "finished"]
    site.until(lambda run: [run.trainings[name].state for name in names] == states, 20)
    site.until(lambda run: all(fragment.end is not None for fragment in run.fragments), 20)
    entries = [entry for _, entry in read_journal(site.executor.journal_path)]
    for name in names[:2]:
        asked = next(entry.time for entry in entries if entry.kind == "training_cancelled" and entry.subject == name)
        left = next(fragment.end for fragment in site.run.fragments if fragment.training == name)
        print(f"left {left - asked:.3f} s after it was given up")
        assert left - asked < 5


@pytest.mark.cluster
def test_a_study_goes_on_after_its_driver_was_killed(tmp_path) -> None:
    """Each trial is there once, with the values that it would have had, and none begins again from its first step."""
    command = [sys.executable, "-m", "tests.extensions.integrations.study_script", str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True, cwd=ROOT) as driver:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with suppress(KeyError):  # the file is there before the study
                if any(len(trial.intermediate_values) >= 3 for trial in _stored(tmp_path).trials):
                    break
            assert driver.poll() is None
            time.sleep(0.2)
        os.kill(driver.pid, signal.SIGKILL)
    running = [trial for trial in _stored(tmp_path).trials if trial.state == TrialState.RUNNING]
    assert running
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    trials = _stored(tmp_path).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4
    assert [list(trial.intermediate_values) for trial in trials] == [list(range(12))] * 4
    for trial in trials:
        assert all(later < earlier for earlier, later in pairwise(trial.intermediate_values.values()))
    resumed = json.loads(result.stdout.splitlines()[-1])
    assert any(resumed[trial.user_attrs["freetrain:training"]] for trial in running)


def _stored(directory: Path):
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(directory / "study.log")))
    return optuna.load_study(study_name="net", storage=storage)
