"""Why a training job waits, is not fused or was refused: the same on the page, in `status` and for scripts."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta

import pytest
from parsl.dataflow.futures import AppFuture
from typer.testing import CliRunner

import freetrain_parsl
from freetrain_parsl import PlannerSettings
from freetrain_parsl.app import TrainingFuture
from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.executor import FreeTrainExecutor
from freetrain_parsl.executor.jobs.request import SPECIFICATION_KEY
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.notebook.shown import ShownCampaign
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import BlockTerms, Window
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import as_json
from freetrain_parsl.report.projection.run import NO_NODES_YET, RunState
from freetrain_parsl.report.run_reader import DriverJournal, RunReader
from tests.cli.test_status import FACTS

SETTINGS = PlannerSettings(startup=timedelta(seconds=30), min_useful=timedelta(minutes=2), max_pending_blocks=1)


def seen(now, *nodes, lasts=60.0, least=1):
    """Return a planner's step that has seen a window."""
    event = ev.WindowsSeen(now, (Window(nodes, now - 1.0, now + lasts),), BlockTerms(min_nodes=least))
    return record.PlannerStep("", [as_json(event)], [])


def waiting(now, *entries):
    """Return the records of a run whose training job waits."""
    return (
        record.PlannerStarted("", "milp", asdict(SETTINGS.in_seconds())),
        record.TrainingSubmitted("a", 1, 2, None),
        record.TrainingStalled("a", "waits for a node to join"),
        *entries,
        record.PlannerStep("", [as_json(ev.Tick(now))], []),  # windows as before are left out
    )


def reasons(*entries, now=1000.0):
    run = RunState()
    for entry in entries:
        run.take(now, entry)
    return run.reasons(now)


def test_windows_that_no_block_can_use_have_the_rule_of_the_planner():
    (short,) = reasons(*waiting(1000.0, seen(1000.0, "n1", "n2")))
    assert short.startswith("idle nodes not used: n[1-2]: shorter than start-up 30 s + minimum 2 min")
    (few,) = reasons(*waiting(1000.0, seen(1000.0, "n1", lasts=9000.0, least=4)))
    assert few == "idle nodes not used: n1: fewer nodes than the minimum of 4 per job"
    assert reasons(*waiting(1000.0, seen(1000.0, "n1", lasts=9000.0))) == []  # the policy decides


def test_blocks_in_the_queue_are_a_reason_until_they_start():
    requested = record.BlockRequested("ft-1", ["n9"], 600.0, None)
    entries = waiting(1000.0, seen(1000.0, "n1", lasts=9000.0), requested)
    assert reasons(*entries) == ["idle nodes not used: n1: 1 of our blocks wait in the queue, the maximum"]
    assert reasons(*entries, record.BlockStarted("ft-1", ["n9"], None)) == []


def test_refused_blocks_and_nodes_that_cannot_be_used_are_reasons():
    refused = record.BlockEnded("ft-1", [], "was refused: Invalid account")
    assert reasons(*waiting(1000.0, refused)) == ["the last block was refused by the batch system: Invalid account"]
    assert reasons(*waiting(1000.0, refused, refused))[0].startswith("the last 2 blocks were refused")
    assert reasons(*waiting(1000.0, refused, record.BlockStarted("ft-2", ["n9"], None))) == []
    aside = [record.NodeSetAside(node, 600.0, "3 jobs failed there") for node in ("n1", "n2")]
    differs = record.EnvironmentDiffers("n3", "Python 3.9 there, 3.11 here", refused=True)
    assert reasons(*waiting(1000.0, *aside, differs)) == [
        "set aside: n[1-2]: 3 jobs failed there",
        "no training job can run on n3: Python 3.9 there, 3.11 here",
    ]
    run = RunState()
    for entry in waiting(1000.0, *aside):
        run.take(1000.0, entry)
    assert run.reasons(1700.0) == []  # they may be used again
    run.take(1100.0, record.NodeJoined("n1", "ft-1", 9000.0))
    assert run.reasons(1200.0) == ["set aside: n2: 3 jobs failed there"]


def test_nothing_is_to_be_explained_if_nothing_waits_for_nodes():
    step = seen(1000.0, "n1")
    assert reasons(*waiting(1000.0, step), record.TrainingFinished("a", trained=True, step=1)) == []
    assert reasons(*waiting(1000.0, step), record.TrainingWaits("a", "the quota is used up", 2000.0)) == []


def test_settings_and_windows_of_another_version_explain_nothing():
    entries = waiting(1000.0, seen(1000.0, "n1"))
    other = record.PlannerStarted("", "milp", {"startup": 1.0})
    assert reasons(other, *entries[1:]) == []
    strange = record.PlannerStep("", [{"type": "windows_seen", "windows": [{"nodes": 3}]}], [])
    assert reasons(*entries, strange) == []


@pytest.fixture
def run(tmp_path):
    """Make a run whose driver is this process, with a training job that waits and one that is not fused."""
    now = time.time()
    store = RunStore.create(tmp_path, FACTS, ["a", "b"])
    driver = store.begin_driver(*own_identity())
    journal = Journal(tmp_path / "journal.sqlite")
    others = (
        record.TrainingSubmitted("b", 1, 2, None),
        record.TrainsAlone("b", "its model has hooks"),
        record.BlockEnded("ft-1", [], "was refused: Invalid account"),
        record.NodeSetAside("n8", 600.0, "3 jobs failed there"),
    )
    for entry in waiting(now, *others, seen(now, "n1", "n2")):
        journal.write(now, entry)
    journal.commit()
    store.describe_driver(driver, "ft-", journal.path)
    run = RunState(journal.path).refresh()
    store.beat(driver, {}, {name: one.remark() for name, one in run.trainings.items()})
    yield tmp_path
    journal.close()
    store.end_driver(driver, "stopped")


class _Executor(FreeTrainExecutor):
    """An executor of which only the journal is asked."""

    def __init__(self, journal):
        self._path = journal

    @property
    def journal_path(self):
        return self._path


class _Kernel:
    """Parsl's kernel, as far as a future knows it."""

    def __init__(self, executor):
        self.executors = {"freetrain": executor}


def future_of(name, journal):
    """Return a future as a training app does."""
    request = type("Request", (), {"options": type("Options", (), {"name": name})})
    kernel = _Kernel(_Executor(journal))
    return AppFuture(
        {"resource_specification": {SPECIFICATION_KEY: request}, "dfk": kernel, "executor": "freetrain", "id": 1}
    )


WHY = (
    "the last block was refused by the batch system: Invalid account",
    "set aside: n8: 3 jobs failed there",
    "idle nodes not used: n[1-2]: shorter than start-up 30 s",
)


@pytest.mark.parametrize("why", WHY)
def test_every_place_has_the_reasons(run, why):
    def shown(*arguments):
        return CliRunner().invoke(app, [*arguments, str(run)]).stdout

    journal = run / "journal.sqlite"
    view = RunReader(RunView("run"), lambda: [DriverJournal(journal)]).refresh().since()
    assert why in "\n".join(view["run"]["reasons"])
    assert view["trainings"]["remark"] == ["waits for a node to join", "not fused: its model has hooks"]
    assert why in shown("status")
    assert why in "\n".join(json.loads(shown("status", "--json"))["reasons"])
    assert why in "\n".join(ShownCampaign(run).explanation())
    for name, remark in (("a", "waits for a node to join; "), ("b", "not fused: its model has hooks; ")):
        told = freetrain_parsl.explain(future_of(name, journal))
        assert told.startswith(remark)
        assert why in told


def test_the_reasons_are_found_without_reading_the_whole_journal(run):
    some, all_ = RunState.with_reasons(run / "journal.sqlite"), RunState(run / "journal.sqlite").refresh()
    now = time.time()
    assert some.reasons(now) == all_.reasons(now) != []
    assert [one.remark() for one in some.trainings.values()] == [one.remark() for one in all_.trainings.values()]


def test_a_future_that_is_done_has_its_error(tmp_path):
    failed, finished = (future_of(name, tmp_path / "none.sqlite") for name in "ab")
    assert freetrain_parsl.explain(failed) == "waits for its arguments, or for Parsl to submit it"
    failed.set_exception(ValueError("no"))
    finished.set_result(1)
    assert [freetrain_parsl.explain(future) for future in (failed, finished)] == ["ValueError: no", ""]


def test_a_future_tells_whether_it_is_fused(run):
    """Also in a script, where nobody reads the journal."""
    future = future_of("b", run / "journal.sqlite")
    future.__class__ = TrainingFuture
    assert future.fusion == "not fused: its model has hooks"


def test_a_future_reads_on_where_it_has_read_before(tmp_path, monkeypatch):
    """A script may ask in a loop, while the journal grows for days."""
    journal, taken = Journal(tmp_path / "journal.sqlite"), []
    future = future_of("a", journal.path)
    future.__class__ = TrainingFuture
    original = RunState.take
    monkeypatch.setattr(RunState, "take", lambda run, at, entry: (taken.append(entry), original(run, at, entry))[1])
    alone = record.TrainsAlone("a", "its model has hooks")
    for entry, told in (
        (record.TrainingSubmitted("a", 1, 2, None), NO_NODES_YET),
        (record.FragmentStarted("a", 1, ["n3"], in_place=False, paused=0.0), "runs on n3"),
        (alone, "not fused: its model has hooks"),
    ):
        journal.write(time.time(), entry)
        journal.commit()
        taken.clear()
        assert freetrain_parsl.explain(future) == told
        assert [each for each in taken if each is not None] == [entry]
        taken.clear()
        assert future.fusion == ("not fused: its model has hooks" if entry is alone else "")
        assert not taken
    journal.close()


def test_other_futures_are_refused():
    with pytest.raises(InvalidInput, match="is not the future of a training app"):
        freetrain_parsl.explain(Future())
