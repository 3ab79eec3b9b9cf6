"""`freetrain explain`."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.cli.runs.explain import explain, unused_lines
from freetrain_parsl.cluster.client import EmbeddedCluster
from freetrain_parsl.errors import BatchSystemError
from freetrain_parsl.planning.model import BlockTerms, Window
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey
from freetrain_parsl.windows.state import BatchState, RunningJob, Scheduling
from tests.cli.fixed_source import FixedSource, run_verb

NOW = 1_000_000.0
X = "\N{MULTIPLICATION SIGN}"
SURVEY = Survey(
    NOW,
    (
        Window(tuple(f"n0{n}" for n in range(1, 6)), NOW, NOW + 90.0),
        Window(("n11", "n12"), NOW, NOW + 7200.0),
        Window(("n20",), NOW, None),
    ),
    terms=BlockTerms(start_delay=30.0, walltime_step=60.0),
    unused={"n30": "drained: bad fan", "n31": "runs job 7 of ann", "n32": "runs job 7 of ann"},
    notes=("of the plan",),
)
TOO_SHORT = "shorter than start within 30 s + start-up 30 s + minimum 1 min + margin 10 s, in steps of 1 min"
APP = """
from freetrain_parsl import training_app

@training_app(scaling={1: 10.0, 2: 18.0}, max_nodes=2)
def train(session): ...
"""


def said(monkeypatch, source, *arguments):
    monkeypatch.setenv("COLUMNS", "200")
    result = run_verb(monkeypatch, explain, source, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_every_window_has_a_sentence_and_every_other_node_a_reason(monkeypatch):
    head, *lines = said(monkeypatch, FixedSource(SURVEY))
    assert head.startswith("Slurm, default partition: 3 windows at ")
    assert lines == [
        f"window of 5 nodes {X} 90 s (n[01-05]) not used: {TOO_SHORT}",
        f"window of 2 nodes {X} 2 h (n[11-12]) used",
        "window of 1 node, no end known (n20) used",
        "3 nodes in no window:",
        "  n[31-32]: runs job 7 of ann",
        "  n30: drained: bad fan",
        "note: no campaign given: assuming one training job on any number of nodes",
        "note: of the plan",
    ]


def test_the_nodes_of_our_blocks_are_not_said_to_run_a_job_of_ours_as_of_others(monkeypatch):
    """A user read "runs job 4 of root" of their own block; where all jobs are listed, and where ours are asked for."""
    unused = {"n1": "runs job 4 of ann until 20:06", "n2": "runs job 7 of bob"}
    jobs = {"4": "freetrain.x.1.block-0"}
    held = Survey(NOW, blocks={"4": BlockStatus(BlockState.RUNNING, ("n1",))})
    listed = FixedSource(Survey(NOW, unused=unused), jobs=jobs)
    running = (RunningJob("4", jobs["4"], "ann", "q", ("n1",), None), RunningJob("7", "x", "bob", "q", ("n2",), None))
    listed.state = lambda: BatchState(NOW, Scheduling("slurm"), running=running)
    for source in (listed, FixedSource(Survey(NOW, unused=unused), held, jobs=jobs)):
        lines = said(monkeypatch, source)
        assert "  n1: runs your block, job 4" in lines
        assert "  n2: runs job 7 of bob" in lines


def test_a_campaign_tells_what_its_trainings_cannot_use(monkeypatch, tmp_path):
    (tmp_path / "explain_app.py").write_text(APP)
    (tmp_path / "campaign.yaml").write_text("trainings: [{app: 'explain_app.py:train', name: t}]\n")
    lines = said(monkeypatch, FixedSource(SURVEY), str(tmp_path / "campaign.yaml"))
    assert lines[2:4] == [
        (
            f"window of 2 nodes {X} 2 h (n[11-12]) used on n11 only: no training job can use more nodes: at most 2 "
            "together"
        ),
        "window of 1 node, no end known (n20) used",
    ]


def test_a_training_that_needs_more_nodes_than_there_are_is_named(monkeypatch, tmp_path):
    (tmp_path / "large_app.py").write_text(APP.replace("max_nodes=2", "min_nodes=2, max_nodes=2"))
    (tmp_path / "campaign.yaml").write_text("trainings: [{app: 'large_app.py:train', name: t}]\n")
    source = FixedSource(replace(SURVEY, nodes=1))
    said_of_it = "note: training job t needs 2 nodes at the same time, but there are only 1: it would be rejected"
    assert said_of_it in said(monkeypatch, source, str(tmp_path / "campaign.yaml"))


def test_the_object_for_programs_says_the_same(monkeypatch):
    result = run_verb(monkeypatch, explain, FixedSource(SURVEY), "--json")
    told = json.loads(result.stdout)
    assert [(row["nodes"], row["used"], bool(row["why_not"])) for row in told["windows"]] == [
        (5, [], True),
        (2, ["n11", "n12"], False),
        (1, ["n20"], False),
    ]
    assert told["windows"][1]["why_not"] is None
    assert (told["time"], told["nodes_in_no_window"]) == (NOW, SURVEY.unused)
    assert told["notes"][-1] == "of the plan"


@pytest.mark.parametrize(
    ("most", "last"), [(2, "  2 nodes for 2 other reasons: --all"), (None, "  n5: d"), (4, "  n5: d")]
)
def test_frequent_reasons_come_first_and_the_others_are_counted(most, last):
    unused = {"n1": "a", "n2": "b", "n3": "b", "n4": "c", "n5": "d", "n6": "c"}
    lines = unused_lines(unused, most)
    assert lines[:3] == ["6 nodes in no window:", "  n[2-3]: b", "  n[4,6]: c"]
    assert lines[-1] == last


def test_all_reasons_are_shown_if_asked_for(monkeypatch):
    source = FixedSource(Survey(NOW, unused={f"n{n}": f"reason {n}" for n in range(20)}))
    assert "  8 nodes for 8 other reasons: --all" in said(monkeypatch, source)
    assert sum("reason" in line for line in said(monkeypatch, source, "--all")) == 20


def test_without_windows_and_nodes_there_is_nothing_to_explain(monkeypatch):
    head, note = said(monkeypatch, FixedSource(Survey(NOW)))
    assert head.startswith("Slurm, default partition: no windows at ")
    assert note.startswith("note: no campaign given")


def test_a_batch_system_that_answers_nonsense_is_one_line(monkeypatch):
    result = run_verb(monkeypatch, explain, FixedSource(BatchSystemError("squeue returned invalid output")))
    assert (result.exit_code, result.stderr) == (2, "freetrain explain: squeue returned invalid output\n")


@pytest.mark.cluster
def test_it_explains_the_windows_of_an_embedded_cluster(monkeypatch, tmp_path):
    """It works without Parsl, without a message about it."""
    directory = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    app = typer.Typer()
    app.command()(explain)
    with EmbeddedCluster(tmp_path, nodes=3, name="site"):
        result = CliRunner().invoke(app, ["--cluster", "site"])
    shutil.rmtree(directory)
    assert result.exit_code == 0
    assert "window of 3 nodes, no end known (n[00-02]) used" in result.stdout
