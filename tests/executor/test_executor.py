"""Real trainings through real Parsl on a real embedded cluster."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import parsl
import psutil
import pytest
import torch
from parsl import bash_app, python_app
from parsl.executors import ThreadPoolExecutor
from parsl.executors.errors import InvalidResourceSpecification

from freetrain_parsl.cluster.workload import MainJob
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.report.run import RunState
from freetrain_parsl.training.fragment import run_alone
from tests.executor.scenario import PLANNER, ScriptedPolicy, Site, make_app

pytestmark = pytest.mark.cluster


def test_a_training_through_rescales_a_killed_block_and_a_killed_worker_ends_as_an_undisturbed_one(
    start, tmp_path
) -> None:
    """1 -> 4 -> 2 -> 3 slots, then its block is cancelled by an admin, then a worker gets SIGKILL."""
    slow = tmp_path / "slow"
    slow.touch()
    train = make_app()
    policy = ScriptedPolicy(1)
    site = start(policy=policy)
    future = train.options(name="t")(epochs=150, slow=str(slow))

    def resumed(count: int, nodes: int | None = None) -> None:
        """Wait for fragment number `count` + 1, and for its first steps."""

        def goes_on(run: RunState) -> bool:
            last = run.fragments[-1] if run.fragments else None
            return sum(f.resumed_from is not None for f in run.fragments) >= count and last.end is None

        site.until(goes_on)
        assert nodes is None or len(site.run.fragments[-1].nodes) == nodes

    site.until(lambda run: run.trainings and run.trainings["t"].progress.get("step", 0) > 5)
    for count, nodes in enumerate((4, 2, 3), start=1):
        policy.nodes = nodes
        resumed(count, nodes)
    queue = site.cluster.queue().items()
    site.cluster.cancel(job for job, status in queue if set(status["nodes"]) & set(site.run.trainings["t"].nodes))
    resumed(4)
    os.kill(_pid_of_a_slot(site, site.run.trainings["t"].nodes[0]), signal.SIGKILL)
    resumed(5)
    slow.unlink()

    result = future.result(timeout=60)
    alone = run_alone(train.func, epochs=150)
    assert result["metrics"]["samples"] == alone["metrics"]["samples"] == 150 * 200
    assert result["metrics"]["steps"] == alone["metrics"]["steps"]
    assert result["lr"] == alone["lr"]
    assert torch.allclose(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)


def _pid_of_a_slot(site: Site, node: str) -> int:
    joined = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "slot_joined"]
    return next(e.detail["pid"] for e in reversed(joined) if e.detail["node"] == node)


def test_a_main_job_that_needs_the_nodes_gets_them_at_once_and_the_training_goes_on_afterwards(start) -> None:
    site = start(nodes=2, workload=(MainJob(submit=9.0, nodes=2, run=2.0, walltime=4.0),))
    future = make_app(max_nodes=2).options(name="t")(epochs=100)
    assert future.result(timeout=60)["metrics"]["samples"] == 100 * 200
    run = site.run
    assert any("preempted" in reason for reason in run.blocks_ended)
    assert run.trainings["t"].resumes >= 1
    assert run.trainings["t"].progress["samples_lost"] == 0
    (delay,) = site.cluster.delays()
    assert delay["delay"] < 4.0, "the grace period at the very most"


def test_a_training_leaves_before_its_window_closes(start) -> None:
    """A queued job of the whole machine is planned at the end of a running one: the window's end is known."""
    long = MainJob(submit=0.0, nodes=1, run=16.0, walltime=16.0)
    head = MainJob(submit=0.3, nodes=3, run=1.0, walltime=2.0)
    site = start(nodes=3, workload=(long, head))
    source = site.executor.provider.window_source()
    site.until(lambda _: any(window.closes for window in source.survey().windows))
    future = make_app(max_nodes=2).options(name="t")(epochs=120)
    assert future.result(timeout=80)["metrics"]["samples"] == 120 * 200
    requests = [e for _, e in read_journal(site.executor.journal_path) if e.kind == "block_requested"]
    assert requests[0].detail["closes"] is not None
    assert requests[0].time + int(requests[0].detail["seconds"]) <= requests[0].detail["closes"]
    first = site.run.fragments[0]
    assert first.end is not None
    assert first.end < requests[0].detail["closes"]
    assert not first.lost
    assert max(delay["delay"] for delay in site.cluster.delays()) < 1.0


def test_an_exception_of_the_user_arrives_with_its_remote_traceback(start) -> None:
    start(nodes=1)
    with pytest.raises(ValueError, match="the user's own mistake") as caught:
        make_app()(epochs=2, fail_at=1).result(timeout=60)
    frames = [entry.name for entry in caught.traceback]
    assert "train" in frames, "the user's frame is part of the traceback"


def test_an_exception_on_several_nodes_ends_the_training_and_frees_the_nodes(start) -> None:
    site = start(nodes=2, policy=ScriptedPolicy(2))
    train = make_app(min_nodes=2)
    with pytest.raises(ValueError, match="the user's own mistake"):
        train(epochs=2, fail_at=1).result(timeout=60)
    assert train(epochs=2).result(timeout=60)["metrics"]["epochs"] == 2
    assert [t.state for t in site.run.trainings.values()] == ["failed", "finished"]


def test_ordinary_apps_run_as_ordinary_tasks_beside_trainings(start) -> None:
    start(nodes=2)

    @python_app
    def square(x):  # noqa: ANN001, ANN202
        return x * x

    @python_app
    def fail():  # noqa: ANN202
        return 1 / 0

    @bash_app
    def say(stdout):  # noqa: ANN001, ANN202
        return "echo hello"

    training = make_app(max_nodes=2)(epochs=10)
    assert [future.result(timeout=60) for future in [square(i) for i in range(20)]] == [i * i for i in range(20)]
    with pytest.raises(ZeroDivisionError):
        fail().result(timeout=60)
    assert say(stdout=parsl.AUTO_LOGNAME).result(timeout=60) == 0
    assert training.result(timeout=60)["metrics"]["samples"] == 2000


def test_other_executors_of_the_same_config_are_untouched(start) -> None:
    site = start(nodes=1, also=[ThreadPoolExecutor(label="threads", max_threads=2)])

    @python_app(executors=["threads"])
    def pid():  # noqa: ANN202
        return os.getpid()

    assert {future.result(timeout=20) for future in [pid() for _ in range(5)]} == {os.getpid()}
    assert site.run.blocks_requested == 0
    assert make_app()(epochs=1).result(timeout=60)["metrics"]["epochs"] == 1


def test_a_block_that_nothing_wants_ends_by_itself_early(start) -> None:
    site = start(nodes=2)
    make_app()(epochs=1).result(timeout=60)
    site.until(lambda run: run.blocks_ended, seconds=20)
    assert not [job for job in site.cluster.queue().values() if job["kind"] == "preemptible"]


def test_a_training_that_keeps_crashing_ends_with_a_message_not_in_a_loop(start) -> None:
    start(nodes=1)

    def crash(session):  # noqa: ANN001, ANN202
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)

    from freetrain_parsl import training_app
    from freetrain_parsl.errors import TooManyRestarts

    with pytest.raises(TooManyRestarts, match="processes died"):
        training_app(crash)().result(timeout=100)


def test_a_stopped_worker_is_given_up_after_the_silence_and_the_training_goes_on(start, tmp_path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    site = start(
        nodes=2,
        policy=ScriptedPolicy(1),
        silence=timedelta(seconds=3),
        planner=replace(PLANNER, join_timeout=5),
    )
    future = make_app().options(name="t")(epochs=20, slow=str(slow))
    site.until(lambda run: run.trainings and run.trainings["t"].checkpoints)
    pid = _pid_of_a_slot(site, site.run.trainings["t"].nodes[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        site.until(lambda run: run.trainings["t"].fragments == 2)
        slow.unlink()
        assert future.result(timeout=60)["metrics"]["samples"] == 4000
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_unknown_resources_and_names_in_use_are_refused_at_submission(start) -> None:
    start(nodes=1)

    @python_app
    def greedy(parsl_resource_specification=None):  # noqa: ANN001, ANN202
        return 1

    with pytest.raises(InvalidResourceSpecification, match="takes no resource specification"):
        greedy(parsl_resource_specification={"cores": 4}).result(timeout=10)
    train = make_app()
    first = train.options(name="same")(epochs=1)
    with pytest.raises(ValueError, match="another name"):
        train.options(name="same")(epochs=1).result(timeout=10)
    assert first.result(timeout=60)


def test_a_second_training_of_the_same_name_resumes_from_the_first_ones_checkpoint(start) -> None:
    site = start(nodes=1)
    train = make_app()
    train.options(name="t")(epochs=2).result(timeout=60)
    time.sleep(0.1)
    longer = train.options(name="t")(epochs=3).result(timeout=60)
    assert longer["metrics"]["epochs"] == 3
    assert site.run.fragments[-1].resumed_from == 2 * 13
