"""What counts as a failure, and that every view has the same number."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.notebook.shown import ShownCampaign
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.projection.incidents import Incidents, count_failures
from freetrain_parsl.report.run_reader import DriverJournal, RunReader
from tests.cli.test_status import FACTS

_VALUES = {"str": "x", "int": 2, "float": 1.0, "bool": True, "list[str]": ["n1"], "dict[str, Any]": {}, "Any": None}
_VALUES |= {"float | None": 1.0, "int | None": 1, "dict[str, int]": {}, "list[dict[str, Any]]": []}
_VALUES |= {"dict[str, float]": {}, "dict[str, str]": {}}

FAILURES = (
    record.FragmentEnded("a", 1, ["n1"], failure=True),
    record.SlotLost("s1", "n1", "no message from it for 60 s"),
    record.NodeSetAside("n1", 600.0, "its function raised"),
    record.TrainingStalled("a", "on n1 its function has not reached session.epochs() yet"),
    record.TrainingFailed("a", "ValueError: x"),
    record.SavingFails("a", "the quota is used up"),
    record.StartsFailed("", 1, 5, None, "sbatch: error"),
)
NO_FAILURES = (
    record.TrainingStalled("b", "waits for a node to join; `freetrain explain` shows why idle nodes are not used"),
    record.TrainingStalled("b", ""),
    record.CohortStalled("cohort-1", "waits for 2 nodes to join; `freetrain explain` shows why"),
    record.NodeClosing("n1", 30.0),
    record.BlockYields("ft-1", ["n1"], 100.0, "job 7 could start"),
    record.SlotLost("s2", "n1", "the batch system reclaims its node", planned=True),
    record.FragmentEnded("b", 2, ["n1"], failure=False),
    record.BlockEnded("ft-1", ["n1"], "preempted"),
    record.CodeChanged("b", "its code has changed"),
    record.EnvironmentDiffers("n1", "torch 2.1 there, 2.2 here", refused=False),
    record.TrainsAlone("b", "its model has hooks"),
    record.TrainingCancelled("b"),
)


@pytest.fixture
def run(tmp_path):
    """Make a run of two drivers, the second one with what is no failure."""
    store = RunStore.create(tmp_path, FACTS, ["a", "b"])
    host, pid, started = own_identity()
    for number, entries in enumerate((FAILURES, NO_FAILURES)):
        driver = store.begin_driver(host, pid, started - number - 1)
        path = tmp_path / f"journal-{number}.sqlite"
        journal = Journal(path)
        for name in ("a", "b"):
            journal.write(0.0, record.TrainingSubmitted(name, 1, 1, None))
        for time, entry in enumerate(entries):
            journal.write(float(time), entry)
        journal.close()
        store.describe_driver(driver, "ft-", path)
        store.end_driver(driver, "stopped")
    return tmp_path


def test_waits_and_planned_preemptions_are_notices():
    incidents = Incidents()
    for entry in NO_FAILURES:
        incidents.take(entry)
    assert (incidents.failures, incidents.notices) == (0, 7)


def test_a_lost_process_is_one_failure_and_a_group_that_lost_only_its_connections_is_one_too():
    incidents, lost = Incidents(), {"n1/0/x": "n1"}
    for entry in (
        record.SlotLost("n1/0/x", "n1", "its process ended"),
        record.FragmentEnded("a", 1, ["n1", "n2"], failure=True, lost=lost),
        record.NodeSetAside("n2", 600.0, "others cannot reach it"),
        record.FragmentEnded("a", 2, ["n1", "n2"], failure=True, lost={"n2/0/y": "n2"}),
        record.SlotLost("n3/0/z", "n3", "its process ended"),
        record.ArrayEnded("cohort-1", "array-1", "n3", failure=True, seconds=1.0, slot="n3/0/z"),
        record.FragmentEnded("b", 3, ["n3"], failure=True, array="array-1"),
        record.FragmentEnded("c", 3, ["n3"], failure=True, array="array-1"),
    ):
        incidents.take(entry)
    assert incidents.failures == 3
    incidents.take(record.FragmentEnded("a", 4, ["n1", "n2"], failure=True))
    incidents.take(record.SlotLost("n1/0/x", "n1", "the batch system reclaims its node", planned=True))
    incidents.take(record.FragmentEnded("a", 5, ["n1", "n2"], failure=True, lost=lost))
    assert incidents.failures == 5


def test_a_training_that_only_waited_was_not_repaired():
    incidents = Incidents()
    assert [incidents.take(entry) is not None for entry in NO_FAILURES[:2]] == [True, False]
    stalled = (record.TrainingStalled("a", "no step for 90 s on n1"), record.TrainingStalled("a", ""))
    assert [incidents.take(entry) is not None for entry in stalled] == [True, True]


def test_every_view_has_the_same_number_of_failures(run):
    def shown(*arguments):
        return CliRunner().invoke(app, [*arguments, str(run)]).stdout

    journals = [run / f"journal-{number}.sqlite" for number in (0, 1)]
    view = RunReader(RunView("run"), lambda: [DriverJournal(path, "stopped", 50.0) for path in journals]).refresh()
    assert view.since()["run"]["failures"] == len(FAILURES)
    assert len(view.since()["incidents"]["row"]) == len(FAILURES)  # no repair in this run
    assert json.loads(shown("report", "--json"))["failures"] == len(FAILURES)
    assert json.loads(shown("status", "--json"))["failures"] == len(FAILURES)
    assert f"failures: {len(FAILURES)}; waits and other notices: 7" in shown("report")
    assert f"{len(FAILURES)} failures so far" in shown("status")
    assert f"{len(FAILURES)} failures so far" in ShownCampaign(run).snapshot().notes


def test_no_kind_of_failure_is_left_out_where_only_some_records_are_read(tmp_path):
    """`status` does not read the whole journal."""
    incidents = Incidents()
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    for kind in record.KINDS.values():
        # Not `planned`, and the reason is no wait.
        values = {field.name: _VALUES[str(field.type)] for field in fields(kind) if field.name != "planned"}
        incidents.take(kind(**values))
        journal.write(0.0, kind(**values))
    journal.close()
    assert incidents.failures == count_failures([path]) > 9
