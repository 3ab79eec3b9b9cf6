"""The view of a run: what its page shows, from handwritten journals."""

from __future__ import annotations

import json

import pytest

from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.pages.node_states import NodeState
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.extensions.pages.web import run_view_script, run_view_style
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.report.run_reader import DriverJournal, RunReader

WINDOW = {"nodes": ["n1", "n2", "n3"], "opens": 100.0, "closes": 400.0}


def seen(*windows):
    return record.PlannerStep("", [{"type": "windows_seen", "time": 0.0, "windows": list(windows)}], [])


RUN = (
    (100.0, record.PlannerStarted("", "milp", {})),
    (100.0, record.TrainingSubmitted("a", 1, 2, 1000)),
    (100.0, record.TrainingSubmitted("b", 1, 2, 1000)),
    (101.0, seen(WINDOW)),
    (102.0, record.BlockRequested("ft-1", ["n1", "n2"], 200.0, 400.0)),
    (103.0, record.BlockSubmitted("ft-1", "77")),
    (105.0, record.BlockStarted("ft-1", ["n1", "n2"], 305.0)),
    (110.0, record.NodeJoined("n1", "ft-1", 305.0)),
    (110.0, record.NodeJoined("n2", "ft-1", 305.0)),
    (110.0, record.Decision("assign", "milp", {"a": 2}, 12.5, proven=True, seconds=0.002)),
    (
        110.0,
        record.PlannerStep(
            "",
            [{"type": "nodes_joined", "time": 110.0, "block": "ft-1", "nodes": [{"name": "n1"}, {"name": "n2"}]}],
            [{"type": "assign", "trainer": "a", "nodes": ["n1", "n2"]}],
        ),
    ),
    (111.0, record.FragmentStarted("a", 1, ["n1", "n2"], in_place=False, paused=0.0)),
    (120.0, record.ValuesSampled("a", 10, {"loss": 0.5})),
    (130.0, record.FragmentEnded("a", 1, ["n1", "n2"], failure=True)),
    (131.0, record.FragmentStarted("a", 2, ["n1"], in_place=True, paused=1.0)),
    (140.0, seen({"nodes": ["n3"], "opens": 100.0, "closes": 400.0})),
    (150.0, record.BlockEnded("ft-1", ["n1", "n2"], "was preempted for another job")),
    (160.0, seen()),
)


def table(delta, name):
    """Return a table of a delta as a list of dictionaries."""
    columns = {key: values for key, values in delta.get(name, {}).items() if key not in ("row", "first")}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def view_of(*entries):
    view = RunView("demo")
    view.take(entries)
    return view


def test_nodes_are_idle_then_ours_then_others():
    delta = view_of(*RUN).since()
    names = delta["nodes"]["name"]
    spans = [(names[s["node"]], NodeState(s["state"]).name, s["begin"], s["end"]) for s in table(delta, "spans")]
    assert [span for span in spans if span[0] == "n1"] == [
        ("n1", "IDLE", 1.0, 5.0),
        ("n1", "OURS", 5.0, 50.0),
        ("n1", "OTHERS", 60.0, None),
    ]
    assert [span[1:] for span in spans if span[0] == "n3"] == [("IDLE", 1.0, 60.0), ("OTHERS", 60.0, None)]


def test_a_window_has_what_became_of_it():
    (window,) = table(view_of(*RUN).since(), "windows")
    assert (window["opens"], window["ended"], window["nodes"]) == (0.0, 60.0, 3)
    assert (window["used"], window["blocks"], window["names"]) == (2, "ft-1", "n[1-3]")


def test_a_decision_has_its_reason_and_its_value():
    (decision,) = table(view_of(*RUN).since(), "decisions")
    assert decision["cause"] == "2 nodes joined"
    assert decision["actions"] == "a: assign to 2 nodes"
    assert (decision["value"], decision["proven"], decision["milliseconds"]) == (12.5, True, 2.0)


def test_failures_are_counted_and_stated():
    delta = view_of(*RUN).since()
    assert table(delta, "trainings")[0]["failures"] == 1
    assert "the group of 2 nodes ended" in table(delta, "incidents")[0]["text"]


@pytest.mark.parametrize(("failure", "stated"), [(True, 2), (False, 0)])
def test_a_training_that_resumes_after_it_was_moved_by_plan_was_not_repaired(failure, stated):
    """As a member that leaves its array: nothing had failed."""
    delta = view_of(
        *RUN[:3],
        (111.0, record.FragmentStarted("a", 1, ["n1"], in_place=False, paused=0.0)),
        (120.0, record.FragmentEnded("a", 1, ["n1"], failure=failure)),
        (121.0, record.FragmentStarted("a", 2, ["n1"], in_place=False, paused=0.0)),
        (121.0, record.FragmentResumed("a", 5, 0.0)),
    ).since()
    assert len(table(delta, "incidents")) == stated


def test_a_training_that_resumes_after_its_driver_was_killed_was_repaired(tmp_path, journal):
    """The failure is the driver's."""
    second = tmp_path / "second.sqlite"
    entries = [
        (300.0, record.TrainingSubmitted("a", 1, 2, 1000)),
        (310.0, record.FragmentStarted("a", 1, ["n9"], in_place=False, paused=0.0)),
        (310.0, record.FragmentResumed("a", 5, 0.0)),
    ]
    write(second, *entries)
    drivers = [DriverJournal(journal, how="killed"), DriverJournal(second)]
    delta = RunReader(RunView("demo"), lambda: drivers, clock=lambda: 500.0).refresh().since()
    assert table(delta, "incidents")[-1]["text"] == "resumed from the checkpoint of step 5"


def test_a_block_has_what_became_of_it_also_if_its_driver_was_killed():
    """Its row is written from the fold that `RunState` has."""
    view = view_of(*RUN, (161.0, record.BlockRequested("ft-2", ["n3"], 50.0, None)))
    first, second = table(view.since(), "blocks")
    assert (first["job"], first["nodes"], first["started"], first["ended"]) == ("77", 2, 5.0, 50.0)
    assert (first["reason"], second["ended"]) == ("was preempted for another job", None)
    view.end_driver(None, "killed")
    assert table(view.since(), "blocks")[1]["reason"] == "the driver was killed"


def test_a_training_that_was_interrupted_is_not_one_that_failed():
    ends = [(170.0, record.TrainingFailed("a", "NoSpace: x", final=False)), (170.0, record.TrainingFailed("b", "E: x"))]
    delta = view_of(*RUN, *ends).since()
    assert [row["state"] for row in table(delta, "trainings")] == ["waiting", "failed"]
    texts = {row["subject"]: row["text"] for row in table(delta, "incidents")}
    assert "freetrain resume" in texts["a"]
    assert texts["b"] == "failed: E: x"


def test_why_a_cohort_waits_is_a_remark_of_its_trainings(tmp_path):
    path = tmp_path / "journal.sqlite"
    reason = "waits for a node to join"
    write(path, *RUN[:3], (101.0, record.CohortJoined("c", ["a", "b"])), (170.0, record.CohortStalled("c", reason)))
    delta = RunReader(RunView("demo"), lambda: [DriverJournal(path)], clock=lambda: 500.0).refresh().since()
    assert all(reason in row["remark"] for row in table(delta, "trainings"))


@pytest.mark.parametrize("cut", range(len(RUN)))
def test_a_reader_that_follows_and_one_that_comes_late_have_the_same(cut):
    view = RunView("demo")
    view.take(RUN[:cut])
    early = view.since()
    view.take(RUN[cut:])
    delta, late = view.since(early["version"]), view_of(*RUN).since()
    for name, whole in late.items():
        if isinstance(whole, dict) and "row" in whole:
            rows = dict(zip(early.get(name, {}).get("row", ()), table(early, name), strict=True))
            rows |= dict(zip(delta.get(name, {}).get("row", ()), table(delta, name), strict=True))
            assert list(rows.values()) == table(late, name)
    assert delta["run"] == late["run"]
    json.dumps(late, allow_nan=False)


def write(path, *entries):
    journal = Journal(path)
    for time, entry in entries:
        journal.write(time, entry)
    journal.keep_progress(entries[-1][0], "a", Progress(step=10, samples=500, samples_total=1000, rate=10.0, loss=0.5))
    journal.close()


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal.sqlite"
    write(path, *RUN)
    return path


def test_a_killed_driver_leaves_nothing_running_and_the_next_one_goes_on(tmp_path, journal):
    drivers = [DriverJournal(journal, how="killed")]
    reader = RunReader(RunView("demo"), lambda: drivers, clock=lambda: 500.0)
    delta = reader.refresh().since()
    assert delta["run"]["ended"] == "killed"
    assert [row["state"] for row in table(delta, "trainings")] == ["waiting", "waiting"]
    assert all(row["end"] is not None for row in table(delta, "fragments"))
    second = tmp_path / "second.sqlite"
    entries = [
        (300.0, record.TrainingSubmitted("a", 1, 2, 1000)),
        (310.0, record.FragmentStarted("a", 1, ["n9"], in_place=False, paused=0.0)),
    ]
    write(second, *entries)
    drivers.append(DriverJournal(second))
    changed = reader.refresh().since(delta["version"])
    assert (changed["run"]["ended"], changed["run"]["now"]) == (None, 400.0)
    (row,) = table(changed, "trainings")
    assert (row["name"], row["state"], row["fragments"], row["share"]) == ("a", "running", 3, 0.5)


@pytest.mark.parametrize(
    ("before", "state"),
    [
        (record.TrainingFailed("a", "E: x"), "failed"),
        (record.TrainingCancelled("a"), "cancelled"),
        (record.TrainingFailed("a", "NoSpace: x", final=False), "waiting"),
        (record.TrainingWaits("a", "the disk is full", 900.0), "running"),
        (record.TrainingStalled("a", "no peer answers"), "running"),
        (record.CodeChanged("a", "its code has changed"), "running"),
    ],
)
def test_a_training_that_is_submitted_again_waits_and_has_no_remark_of_an_earlier_driver(before, state):
    view = view_of(*RUN, (161.0, before))
    row = table(view.since(), "trainings")[0]
    assert row["state"] == state
    assert row["remark"] or row["error"] or state == "cancelled"
    view.end_driver(170.0, "stopped")
    view.begin_driver()
    view.take([(300.0, record.PlannerStarted("", "milp", {})), (300.0, record.TrainingSubmitted("a", 1, 3, 1000))])
    row = table(view.since(), "trainings")[0]
    assert (row["state"], row["ended"], row["remark"], row["error"]) == ("waiting", None, "", "")
    assert (row["max_nodes"], row["submitted"], row["fragments"], row["failures"]) == (3, 0.0, 2, 1)


def test_members_of_an_array_train_on_one_node():
    """It was counted once for each of them."""
    members = [record.FragmentStarted(name, 3, ["n1"], in_place=False, paused=0.0, array="c-1") for name in "ab"]
    view = view_of(*RUN[:9], *((112.0, each) for each in members))
    assert view.since()["run"]["training_nodes"] == 1
    view.end_driver(None, "killed")
    assert view.since()["run"]["training_nodes"] == 0


def test_failed_starts_and_windows_are_those_of_the_driver_that_runs():
    view = view_of(*RUN[:4], (110.0, record.StartsFailed("", 2, 5, 130.0, "no such partition")))
    run = view.since()["run"]
    assert "the last 2 of at most 5 attempts" in run["starts_failed"]
    assert run["idle_nodes"] == 3
    view.end_driver(120.0, "stopped")
    assert view.since()["run"]["starts_failed"] == ""
    view.begin_driver()
    view.take([(300.0, record.PlannerStarted("", "milp", {}))])
    run = view.since()["run"]
    assert (run["starts_failed"], run["idle_nodes"]) == ("", 0)


def test_a_journal_that_vanishes_is_named_and_what_was_read_stays(journal):
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(journal)], clock=lambda: 500.0)
    reader.refresh()
    journal.unlink()
    run = reader.refresh().since()
    assert str(journal) in run["run"]["problem"]
    assert "is missing" in run["run"]["problem"]
    assert len(table(run, "trainings")) == 2


def test_a_run_whose_journals_are_all_missing_has_ended(tmp_path):
    """It was shown as running."""
    drivers = [DriverJournal(tmp_path / "none.sqlite", how="finished", ended=400.0)]
    run = RunReader(RunView("demo"), lambda: drivers, clock=lambda: 500.0).refresh().since()["run"]
    assert (run["ended"], run["now"]) == ("finished", None)
    assert "none.sqlite is missing" in run["problem"]


def test_a_journal_that_was_replaced_is_named(tmp_path, journal):
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(journal)], clock=lambda: 500.0)
    reader.refresh()
    write(tmp_path / "other.sqlite", *RUN)
    (tmp_path / "other.sqlite").replace(journal)
    assert "it was replaced by another file" in reader.refresh().since()["run"]["problem"]


@pytest.mark.parametrize("damage", ["bytes", "json", "fields"])
def test_a_damaged_journal_is_named_and_does_not_end_the_reader(journal, damage):
    import sqlite3

    if damage == "bytes":
        content = journal.read_bytes()
        journal.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    else:
        with sqlite3.connect(journal) as database:
            broken = "{" if damage == "json" else '{"nodes": 3, "ends": "x"}'
            database.execute("UPDATE event SET detail = ? WHERE kind = 'block_started'", (broken,))
        database.close()
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(journal, how="finished", ended=160.0)])
    for _ in range(2):
        delta = reader.refresh().since()
        assert str(journal) in delta["run"]["problem"]
        assert damage == "bytes" or delta["run"]["ended"] == "finished"
    if damage == "fields":
        assert "entry 7 has unexpected content" in delta["run"]["problem"]
        assert len(table(delta, "fragments")) == 2, "the rest is shown"


def test_a_run_without_a_journal_yet_is_empty_and_has_no_problem(tmp_path):
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(tmp_path / "journal.sqlite")], clock=lambda: 500.0)
    delta = reader.refresh().since()
    assert (delta["run"]["problem"], delta["run"]["origin"]) == ("", None)
    assert delta["version"] > 0, "a reader that has nothing gets it"
    assert delta["reset"]


def test_time_passes_for_a_reader_although_nothing_happens(journal):
    now = 300.0
    reader = RunReader(RunView("demo"), lambda: [DriverJournal(journal)], clock=lambda: now)
    reader.refresh()
    version = reader.refresh().version
    now = 305.0
    assert reader.refresh().version == version
    now = 311.0
    assert reader.refresh().since(version)["run"]["now"] == 211.0


def test_the_script_is_one_module_that_loads_nothing():
    script = run_view_script()
    assert script.count("export ") == 1
    assert "import " not in script
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    assert len((script + run_view_style()).encode()) < 100_000


def test_a_block_holds_its_nodes_since_its_job_started():
    """On Slurm that is seen up to a poll interval later, after its nodes have joined; the timeline began there."""
    window = {"nodes": ["n1", "n2", "n3"], "opens": 0.0, "closes": 900.0}
    seen = [{"type": "windows_seen", "time": 100.0, "windows": [window]}]
    taken = [{"type": "windows_seen", "time": 150.0, "windows": []}]
    entries = [
        (100.0, record.PlannerStep("", seen, [])),
        (101.0, record.BlockRequested("0", ["n1", "n2"], 600.0, None)),
        (115.0, record.NodeJoined("n1", "0", 900.0)),
        (130.0, record.BlockStarted("0", ["n1", "n2"], 703.0, since=103.0)),
        (140.0, record.BlockEnded("0", ["n1", "n2"], "ended")),
        (150.0, record.PlannerStep("", taken, [])),
        (160.0, record.BlockStarted("1", ["n1"], 735.0, since=135.0)),
    ]
    view = RunView("sweep")
    view.take(entries)
    names, spans = view.since()["nodes"]["name"], view.since()["spans"]
    of_node = {name: [] for name in names}
    for node, state, begin, end in zip(spans["node"], spans["state"], spans["begin"], spans["end"], strict=True):
        of_node[names[node]].append((state, begin, end))
    idle, others, ours = NodeState.IDLE, NodeState.OTHERS, NodeState.OURS
    until_taken = [(idle, 0.0, 3.0), (ours, 3.0, 40.0), (idle, 40.0, 50.0)]
    assert of_node["n1"] == [*until_taken, (others, 50.0, 50.0), (ours, 50.0, None)], "not before the span before"
    assert of_node["n2"] == [*until_taken, (others, 50.0, None)]
    assert of_node["n3"] == [(idle, 0.0, 50.0), (others, 50.0, None)]
    (row,) = (at for at, name in enumerate(view.since()["blocks"]["name"]) if name == "0")
    assert view.since()["blocks"]["started"][row] == 3.0
