"""State, figures and pictures of a run, from a handwritten journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.executor.training_logs import mark_of
from freetrain_parsl.planning import events as ev
from freetrain_parsl.planning.model import Window
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.protocol.codec import as_json
from freetrain_parsl.protocol.reports import Progress
from freetrain_parsl.report.figures import run_figures
from freetrain_parsl.report.live import live_view
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.report.sentences import incident_of
from freetrain_parsl.report.timeline import draw_timeline

if TYPE_CHECKING:
    from pathlib import Path

PROGRESS = Progress(
    step=40, epoch=3, samples=800, samples_total=1000, slot_seconds=30.0, loss=0.25, duplicate_samples=1
)
HISTORY = [
    {"node": "n0", "job": "1", "kind": "main", "start": 0.0, "end": 5.0},
    {"node": "n0", "job": "2", "kind": "preemptible", "start": 5.0, "end": None},
    {"node": "n1", "job": "2", "kind": "preemptible", "start": 5.0, "end": 40.0},
]


@pytest.fixture
def run(tmp_path: Path) -> RunState:
    """Two training jobs: `a` starts on one node, grows, has a node failure and resumes; `b` fails."""
    journal = Journal(tmp_path / "journal.sqlite")
    for name in ("a", "b"):
        journal.write(1.0, record.TrainingSubmitted(name, 1, 2, None))
    journal.write(2.0, record.PlannerStep("", [as_json(ev.WindowsSeen(2.0, (Window(("n1",), 2.0, 60.0),)))], []))
    journal.write(3.0, record.Decision("assign", "milp", {}, 1.0, proven=True, seconds=0.002))
    journal.write(3.0, record.Decision("demand", "milp", {}, 1.0, proven=False, seconds=0.004))
    journal.write(10.0, record.FragmentStarted("a", 1, ["n0"], in_place=False, paused=0.0))
    journal.write(12.0, record.Checkpoint("a", 10))
    journal.write(20.0, record.FragmentEnded("a", 1, ["n0"], failure=False))
    journal.write(21.0, record.FragmentStarted("a", 2, ["n0", "n1"], in_place=False, paused=0.0))
    journal.write(21.5, record.FragmentResumed("a", 10, 0.0))
    journal.write(30.0, record.FragmentEnded("a", 2, ["n0", "n1"], failure=True))
    journal.write(31.0, record.FragmentStarted("a", 3, ["n0"], in_place=False, paused=0.0))
    journal.write(31.5, record.FragmentResumed("a", 20, 0.0))
    journal.write(33.0, record.TrainingFailed("b", "ValueError: no"))
    journal.keep_progress(34.0, "a", PROGRESS)
    journal.close()
    return RunState(journal.path).refresh()


def test_fragments_rescales_resumes_and_losses_are_counted(run: RunState) -> None:
    a = run.trainings["a"]
    assert (a.fragments, a.rescales, a.resumes, a.checkpoints) == (3, 2, 2, 1)
    assert [fragment.failure for fragment in run.fragments] == [False, True, False]
    assert a.state == "running"
    assert a.nodes == ("n0",)
    assert a.share_done == 0.8
    assert run.trainings["b"].error == "ValueError: no"


def test_reading_on_adds_only_what_is_new(run: RunState, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write(40.0, record.TrainingFinished("a", trained=True, step=40))
    journal.close()
    run.refresh()
    assert run.completed == 1
    assert run.trainings["a"].fragments == 3


def test_members_of_a_cohort_that_wait_say_what_for(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for name in ("a", "b", "c"):
        journal.write(1.0, record.TrainingSubmitted(name, 1, 2, None))
    journal.write(1.5, record.CohortJoined("cohort-1", ["a", "b"]))
    journal.write(50.0, record.CohortStalled("cohort-1", "waits for a node to join"))
    journal.commit()
    run = RunState(journal.path).refresh()
    assert [training.remark() for training in run.trainings.values()] == ["waits for a node to join"] * 2 + [""]
    journal.write(60.0, record.CohortStalled("cohort-1", ""))
    journal.commit()
    assert run.refresh().trainings["a"].remark() == ""
    journal.write(61.0, record.FragmentStarted("a", 1, ["n0"], in_place=False, paused=0.0, array="array-1"))
    journal.commit()
    run.refresh()
    assert run.trainings["b"].remark() == "waits for a place in an array of cohort-1"
    assert run.trainings["a"].remark() == "in array-1, alone"
    journal.write(62.0, record.TrainsAlone("b", "it has a sharded model"))
    journal.close()
    assert run.refresh().trainings["b"].remark() == "not fused: it has a sharded model"


@pytest.mark.parametrize(
    "end",
    [
        record.TrainingCancelled("a"),
        record.TrainingFailed("a", "ValueError: no"),
        record.TrainingFinished("a", trained=True, step=4),
    ],
)
def test_a_training_that_has_ended_waits_for_nothing(end) -> None:
    """A cancelled one waited for a node to join."""
    run = RunState()
    reasons = (
        record.TrainingSubmitted("a", 1, 2, None),
        record.TrainingStalled("a", "waits for a node to join"),
        record.TrainingWaits("a", "the quota is used up", 90.0),
        record.TrainsAlone("a", "its model has hooks"),
    )
    for entry in reasons:
        run.take(1.0, entry)
    assert run.trainings["a"].remark() == "waits: the quota is used up"
    run.take(2.0, end)
    fusion = "not fused: its model has hooks" if isinstance(end, record.TrainingFinished) else ""
    assert run.trainings["a"].remark() == fusion


def test_without_a_driver_a_training_waits_for_nothing_but_a_resume() -> None:
    run = RunState()
    for name in ("a", "b"):
        run.take(1.0, record.TrainingSubmitted(name, 1, 2, None))
    run.take(1.5, record.CohortJoined("cohort-1", ["b"]))
    run.take(2.0, record.TrainingStalled("a", "waits for a node to join"))
    run.take(2.0, record.CohortStalled("cohort-1", "waits for a node to join"))
    run.take_progress({})
    assert [training.remark() for training in run.trainings.values()] == ["waits for a node to join"] * 2
    run.end_driver(3.0)
    run.take_progress({})
    assert [(training.state, training.remark()) for training in run.trainings.values()] == [("waiting", "")] * 2


def test_a_training_that_resume_continues_waits_with_its_reason(tmp_path: Path) -> None:
    """As in the run's own table; other errors are failures."""
    journal = Journal(tmp_path / "journal.sqlite")
    for name in ("a", "b"):
        journal.write(1.0, record.TrainingSubmitted(name, 1, 2, None))
    journal.write(2.0, record.TrainingFailed("a", "CodeChanged: training job 'a': it was edited\n", final=False))
    journal.write(2.0, record.TrainingFailed("b", "ValueError: no"))
    journal.close()
    a, b = RunState(journal.path).refresh().trainings.values()
    assert (a.state, a.remark()) == ("waiting", "CodeChanged: training job 'a': it was edited")
    assert (b.state, b.remark()) == ("failed", "")


def test_a_run_without_a_journal_yet_is_empty(tmp_path: Path) -> None:
    assert RunState(tmp_path / "nowhere.sqlite").refresh().trainings == {}


def test_figures_add_up(run: RunState) -> None:
    figures = run_figures(
        run,
        usage={"elapsed": 50.0, "idle_node_seconds": 80.0, "preemptible_node_seconds": 60.0},
        delays=[{"delay": 0.2}, {"delay": 1.5}],
        main_jobs=3,
        results={"a": {"loss": 0.1}},
        delay_tolerance=1.0,
        slots_per_node=2,
    )
    assert figures["trainings_completed"] == 0
    assert (figures["fragments"], figures["rescales"], figures["resumes_from_checkpoint"]) == (3, 2, 2)
    assert figures["useful_node_seconds"] == 15.0
    assert figures["useful_share_of_used"] == 0.25
    assert (figures["main_jobs_delayed"], figures["main_job_delay_seconds_max"]) == (1, 1.5)
    assert figures["duplicate_samples"] == 1
    assert figures["solver"] == {"median_ms": 3.0, "max_ms": 4.0, "solves": 2, "proven": 1}


def test_the_live_view_tells_who_has_each_node_and_what_is_open(run: RunState) -> None:
    nodes = {
        "n0": {"kind": "preemptible", "job": "2"},
        "n1": {"kind": "idle", "job": None},
        "n2": {"kind": "main", "job": "7"},
    }
    console = Console(width=110, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115 - drawn, not shown
    console.print(live_view(run, nodes, now=40.0, elapsed=39.0, title="Demo"))
    console.file.close()
    text = console.export_text()
    rows = {line.split()[1]: line for line in text.splitlines() if line.startswith("│   n")}
    assert "■ a" in rows["n0"]
    assert "idle" in rows["n1"]
    assert "closes in 20 s" in rows["n1"]
    assert "main job 7" in rows["n2"]
    assert "0 of 2 training jobs done" in text
    assert "0.2500" in text


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_the_timeline_is_drawn_in_the_format_of_its_name(
    run: RunState, tmp_path: Path, suffix: str, magic: bytes
) -> None:
    path = tmp_path / f"timeline{suffix}"
    draw_timeline(run, HISTORY, path, title="A run")
    assert path.read_bytes().startswith(magic)
    if suffix == ".svg":
        text = path.read_text()
        assert "#e69f00" in text, "the first training job's colour"
        assert "#8a8a8a" in text, "main jobs"


@pytest.fixture
def fused(tmp_path: Path) -> RunState:
    """Six training jobs in an array on one node; `t1` leaves it and `t6` takes its place; `alone` is not fused."""
    journal = Journal(tmp_path / "fused.sqlite")
    names = [f"t{number}" for number in range(7)]
    for name in (*names, "alone"):
        journal.write(1.0, record.TrainingSubmitted(name, 1, 1, None))
    journal.write(2.0, record.CohortJoined("cohort-1", names))
    journal.write(3.0, record.TrainsAlone("alone", "they are 0.9 times as fast"))
    for name in names[:6]:
        journal.write(10.0, record.FragmentStarted(name, 5, ["n0"], in_place=False, paused=0.0, array="array-5"))
    journal.write(12.0, record.ArrayMeasured("cohort-1", 2, 1.5))
    journal.write(13.0, record.ArrayMeasured("cohort-1", 6, 2.5))
    journal.write(20.0, record.FragmentEnded("t1", 5, ["n0"], failure=False, seconds=10.0, array="array-5"))
    journal.write(20.0, record.TrainingFinished("t1", trained=True, step=10))
    journal.write(20.0, record.FragmentStarted("t6", 5, ["n0"], in_place=False, paused=0.0, array="array-5"))
    journal.close()
    return RunState(journal.path).refresh()


def test_trainings_tell_with_how_many_others_they_run(fused: RunState) -> None:
    assert fused.trainings["t0"].remark() == "in array-5 with 5 others, fused"
    assert fused.trainings["t1"].remark() == ""
    assert fused.trainings["alone"].remark() == "not fused: they are 0.9 times as fast"
    assert fused.gains == {"cohort-1": (6, 2.5)}


@pytest.mark.parametrize(
    ("turns", "how"),
    [
        ("", "fused, base shared: 74.0 MB once for 6 members"),
        ("fused 0.9", "in turns, base shared: 74.0 MB once for 6 members; fused 0.9"),
    ],
)
def test_members_tell_what_they_have_in_memory_once_and_whether_they_step_in_turns(
    fused: RunState, turns: str, how: str
) -> None:
    entry = record.BaseShared("t0", "array-5", 4, 74_000_000, turns)
    fused.take(30.0, entry)
    assert fused.trainings["t0"].remark() == f"in array-5 with 5 others, {how}"
    assert fused.trainings["t0"].in_turns == bool(turns)
    assert mark_of(entry) == f"in array-5, {how}".replace("6 members", "4 members")
    incident = incident_of(entry)
    assert (incident is not None) == bool(turns)
    fused.take(31.0, record.FragmentStarted("t0", 6, ["n1"], in_place=False, paused=0.0, array="array-6"))
    assert fused.trainings["t0"].shared is None


def test_members_of_an_array_share_the_row_of_its_node(fused: RunState, tmp_path: Path) -> None:
    lanes = {fragment.training: fragment.lane for fragment in fused.fragments}
    assert lanes == {"t0": 0, "t1": 1, "t2": 2, "t3": 3, "t4": 4, "t5": 5, "t6": 1}
    draw_timeline(fused, HISTORY, tmp_path / "timeline.svg", title="fused")
    assert "t6" in (tmp_path / "timeline.svg").read_text()


def test_the_live_view_of_an_array_is_short(fused: RunState) -> None:
    console = Console(width=120, record=True)
    nodes = {"n0": {"kind": "preemptible", "job": "2"}}
    console.print(live_view(fused, nodes, 30.0, 30.0, "demo"))
    text = console.export_text()
    assert "■ t0 ■ t2 ■ t3 ■ t4 and 2 more, fused" in text
    assert "t0, t2, t3, t4 and 2 more in array-5 with 5 others, fused" in text


def test_blocks_hold_nodes_until_they_end(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "blocks.sqlite")
    journal.write(10.0, record.BlockRequested("b1", ["n0", "n1"], 100.0, None))
    journal.write(10.0, record.BlockRequested("b2", ["n2"], 100.0, None))
    journal.write(20.0, record.BlockStarted("b1", ["n0", "n1"], 120.0))
    journal.commit()
    run = RunState(tmp_path / "blocks.sqlite").refresh()
    assert sorted(run.blocks.held(20.0)) == [(1, 90.0), (2, 100.0)]
    journal.write(30.0, record.BlockYields("b1", ["n0", "n1"], 50.0, "a job needs them"))
    journal.write(31.0, record.BlockReleased("b2", "idle"))
    journal.commit()
    assert run.refresh().blocks.held(40.0) == [(2, 10.0)]
    assert run.blocks.held(50.0) == []
    journal.write(45.0, record.BlockEnded("b1", ["n0", "n1"], "preempted"))
    journal.close()
    assert run.refresh().blocks.held(45.0) == []
    assert (run.blocks_requested, run.blocks_ended) == (2, ["preempted"])


def test_before_the_first_block_has_a_node_its_nodes_are_what_trainings_wait_for() -> None:
    """Also after the driver has said that they wait, and until it says why they still do."""
    run = RunState()
    run.take(1.0, record.TrainingSubmitted("a", 1, 2, None))
    run.take(2.0, record.TrainingStalled("a", "waits for a node to join"))
    run.take(3.0, record.BlockRequested("0", ["n1", "n2"], 600.0, None))
    run.take_progress({})
    assert run.trainings["a"].remark() == "waits for its 2 nodes: the job is being submitted"
    run.take(4.0, record.BlockSubmitted("0", "17"))
    run.take_progress({})
    assert run.trainings["a"].remark() == "waits for its 2 nodes: job 17 is in the queue, or starting"
    run.take(5.0, record.BlockRequested("1", ["n3"], 600.0, None))
    run.take(5.0, record.BlockSubmitted("1", "18"))
    run.take_progress({})
    assert run.trainings["a"].remark() == "waits for its 3 nodes: jobs 17, 18 are in the queue, or starting"
    run.take(6.0, record.NodeJoined("n1", "0", 600.0))
    run.take_progress({})
    assert run.trainings["a"].remark() == "waits for a node to join"


def test_a_training_waits_for_nodes_that_others_use() -> None:
    """As long as they do; a node that has left is nobody's."""
    run = RunState()
    for name in ("a", "b"):
        run.take(1.0, record.TrainingSubmitted(name, 1, 2, None))
    run.take(3.0, record.BlockRequested("0", ["n1", "n2"], 600.0, None))
    for node in ("n1", "n2"):
        run.take(6.0, record.NodeJoined(node, "0", 600.0))
    run.take(7.0, record.FragmentStarted("a", 1, ["n1"], in_place=False, paused=0.0, array=""))
    run.take_progress({})
    assert run.trainings["b"].remark() == ""
    run.take(8.0, record.NodeLeft("n2", "lost"))
    run.take_progress({})
    assert run.trainings["b"].remark() == "waits for a place on the nodes of this run, which others use"
    run.take(9.0, record.BlockEnded("0", ["n1", "n2"], "ended"))
    run.take_progress({})
    assert run.trainings["b"].remark() == ""
