"""Injected faults in a running executor: training jobs lose only time, or end with the user's own error."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from freetrain_parsl import CheckpointSettings, training_app
from freetrain_parsl.errors import NonFiniteLoss
from freetrain_parsl.executor.jobs.request import Limits
from freetrain_parsl.executor.journal import read_journal
from freetrain_parsl.testing.faults import (
    PROCESS_FAULTS,
    Damage,
    Injector,
    corrupt_checkpoint,
    kill_all,
    partition,
    slots_on_this_machine,
    stopped,
)
from freetrain_parsl.training.fragment import run_local
from tests.executor.scenario import TRAININGS, ScriptedPolicy, make_app

if TYPE_CHECKING:
    from tests.executor.scenario import Site

pytestmark = pytest.mark.cluster

EPOCHS = 12


def test_members_that_cannot_hear_each_other_go_on_after_the_loss_timeout(start, slow) -> None:
    """No traffic between two live members: no error, no closed connection, no message."""
    site = start(nodes=2, policy=ScriptedPolicy(2), trainings=replace(TRAININGS, peer_timeout=timedelta(seconds=3)))
    future = make_app(max_nodes=2).options(name="t")(epochs=EPOCHS, slow=str(slow))
    _until_it_trains_on(site, 2)
    one, other = _slots(site).values()
    # If its second node joined later, it has grown in place before: only a further group is the answer.
    before = len(site.run.fragments)
    with partition(one, [other]) as connections:
        assert connections
        begun = time.time()
        site.until(lambda run: len(run.fragments) > before)
        step = _step(site)
        site.until(lambda _: _step(site) > step + 3)
    slow.unlink()
    ended, regrouped = site.run.fragments[before - 1 : before + 1]
    assert ended.failure
    assert regrouped.in_place
    assert len(regrouped.nodes) == 2
    # Members wait for each other before, too, on a busy machine; the next longer timeout is that of a meeting.
    assert 1.5 < regrouped.start - begun < Limits.meeting_timeout
    _ends_as_if_alone(site, future)
    assert site.run.trainings["t"].resumes == 0


@pytest.mark.smoke
def test_a_node_whose_slots_die_at_once_is_one_loss_answered_in_place(start, slow) -> None:
    policy = ScriptedPolicy(2)
    site = start(nodes=2, policy=policy, slots_per_node=2, share_nodes=False)
    future = make_app(max_nodes=2).options(name="t")(epochs=EPOCHS, slow=str(slow))
    _until_it_trains_on(site, 2)
    slots = _slots(site)
    node = site.run.trainings["t"].nodes[0]
    step, killed = _step(site), time.time()
    policy.avoid = frozenset([node])
    kill_all(pid for slot, pid in slots.items() if slot.startswith(f"{node}/"))
    site.until(lambda run: any(fragment.failure for fragment in run.fragments) and _step(site) > step)
    slow.unlink()
    before, after = site.run.fragments[-2:]
    assert (len(before.nodes), len(after.nodes), before.failure, after.in_place) == (2, 1, True, True)
    assert after.start - killed < 10
    _ends_as_if_alone(site, future)
    assert site.run.trainings["t"].resumes == 0


def test_a_training_on_a_hostile_machine_ends_as_on_a_kind_one(start, slow) -> None:
    seconds = timedelta(seconds=3)
    trainings = replace(TRAININGS, heartbeat_timeout=seconds, peer_timeout=seconds, max_restarts=5)  # one a fault
    site = start(nodes=3, policy=ScriptedPolicy(3), trainings=trainings)
    future = make_app(max_nodes=3).options(name="t")(epochs=EPOCHS, slow=str(slow))
    _until_it_trains_on(site, 3)
    schedule = [(0.1, "cut"), (1.5, "slow"), (2.0, "kill"), (4.0, "cut"), (5.0, "stop")]
    injector = Injector(
        3,
        lambda: _slots(site),
        faults=PROCESS_FAULTS,
        schedule=[(timedelta(seconds=after), fault) for after, fault in schedule],
        lasting=timedelta(seconds=4),  # a stopped process may have been dropped by then, or may continue
    )
    records = injector.run()
    assert any(record.fault == "kill" and not record.outcome for record in records)
    slow.unlink()
    _ends_as_if_alone(site, future)
    assert any(fragment.failure for fragment in site.run.fragments)


def test_after_a_damaged_checkpoint_and_the_loss_of_all_slots_the_one_before_is_used(start, slow, tmp_path) -> None:
    site = start(nodes=2, policy=ScriptedPolicy(2), checkpoints=CheckpointSettings(interval=timedelta(seconds=1)))
    future = make_app(max_nodes=2).options(name="t")(epochs=EPOCHS, slow=str(slow))
    _until_it_trains_on(site, 2)
    site.until(lambda run: run.trainings["t"].checkpoints >= 2)
    pids = list(_slots(site).values())
    with stopped(pids[0]):  # else it would publish another checkpoint meanwhile
        damaged = corrupt_checkpoint(tmp_path / "checkpoints" / "t", random.Random(1), Damage.FLIP)
        kill_all(pids)
    slow.unlink()
    progress = _ends_as_if_alone(site, future)
    assert site.run.trainings["t"].resumes == 1
    assert progress["refused_checkpoints"] == [str(damaged.parent)]


def test_a_rank_that_is_wrong_rather_than_dead_ends_the_training_with_its_own_error(start) -> None:
    """Each is tried once, not in a retry loop."""

    def train(session, *, fault):
        import torch
        from torch.utils.data import TensorDataset

        model, _ = session.prepare(net := torch.nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
        data = session.loader(TensorDataset(torch.ones(64, 2)), batch_size=8)
        for _ in session.epochs(3):
            for (x,) in data:
                loss = model(x).square().mean()
                if session.rank == 1 and session.metrics["steps"] == 5:
                    if fault == "mistake":
                        raise ValueError("the user's own mistake")
                    loss = loss * float("nan")
                session.step(loss)

    site = start(nodes=2)
    app = training_app(min_nodes=2, max_nodes=2)(train)
    with pytest.raises(ValueError, match="the user's own mistake"):
        app.options(name="mistake")(fault="mistake").result(timeout=60)
    with pytest.raises(NonFiniteLoss, match="nan"):
        app.options(name="nan")(fault="nan").result(timeout=60)
    site.until(lambda run: all(training.state == "failed" for training in run.trainings.values()))
    assert [fragment.training for fragment in site.run.fragments] == ["mistake", "nan"]


def _until_it_trains_on(site: Site, nodes: int) -> None:
    site.until(lambda run: run.trainings and len(run.trainings["t"].nodes) == nodes)
    since = _step(site)
    site.until(lambda _: _step(site) > since + 3)


def _step(site: Site) -> int:
    return site.run.trainings["t"].progress.get("step", 0)


def _slots(site: Site) -> dict[str, int]:
    return slots_on_this_machine(entry for _, entry in read_journal(site.executor.journal_path))


def _ends_as_if_alone(site: Site, future):
    """Check the training job's result and its metrics; return its last progress."""
    result = future.result(timeout=60)
    alone = run_local(make_app().func, epochs=EPOCHS)
    assert result["metrics"]["samples"] == alone["metrics"]["samples"] == EPOCHS * 200
    assert result["metrics"]["steps"] == alone["metrics"]["steps"]
    assert torch.allclose(torch.tensor(result["parameters"]), torch.tensor(alone["parameters"]), atol=1e-4)
    progress = site.until(lambda run: run.completed and run.trainings["t"].progress)
    assert (progress["samples_lost"], progress["duplicate_samples"]) == (0, 0)
    return progress
