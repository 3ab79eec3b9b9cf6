"""`freetrain plan`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.plan import plan, plan_figures, print_plan
from freetrain_parsl.cli.preview import ask_planner
from freetrain_parsl.cli.sources import ChosenSource
from freetrain_parsl.errors import InvalidApp, InvalidSettings
from freetrain_parsl.planning.model import BlockTerms, Window
from freetrain_parsl.windows.base import BlockState, BlockStatus, Survey
from freetrain_parsl.windows.state import BatchState, PendingJob, RunningJob, Scheduling
from tests.cli.fixed_source import FixedSource, run_verb

if TYPE_CHECKING:
    from pathlib import Path

NOW = 1_000_000.0
WINDOWS = (
    Window(("n1", "n2"), NOW, NOW + 1000.0, partition="main"),
    Window(("n3",), NOW, NOW + 90.0),
    Window(("n4",), NOW, None),
)
SURVEY = Survey(NOW, WINDOWS, terms=BlockTerms(start_delay=30.0, walltime_step=60.0), notes=("of the plan",))
APP = """
from freetrain_parsl import training_app

@training_app(scaling={1: 10.0, 2: 18.0})
def train(session, lr=0.1): ...
"""
CAMPAIGN = """
trainings:
  - {app: "plan_app.py:train", name: "small", max_nodes: 1, samples: 3000, fuse: false}
  - {app: "plan_app.py:train", name: "large", max_nodes: "${MOST}"}
"""


SWEEP = """
name: sweep
trainings:
  - name: "rate-{lr}"
    app: plan_app:train
    grid: {lr: [0.1, 0.2, 0.3]}
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory) -> Path:
    """One file for all tests: a module is imported only once."""
    directory = tmp_path_factory.mktemp("campaign")
    (directory / "plan_app.py").write_text(APP)
    (directory / "campaign.yaml").write_text(CAMPAIGN)
    return directory / "campaign.yaml"


def figures(monkeypatch, source, *arguments):
    result = run_verb(monkeypatch, plan, source, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_without_a_campaign_the_plan_is_for_a_training_that_takes_any_number_of_nodes(monkeypatch):
    """Blocks of 3600 s and, in whole minutes, 960 s; start-up 30 s, margin 10 s, start of the training job 2 s."""
    source = FixedSource(SURVEY)
    told = figures(monkeypatch, source)
    assert [(block["node_names"], block["walltime"], block["node_seconds"]) for block in told["blocks"]] == [
        (["n4"], 3600, 3558),
        (["n1", "n2"], 960, 2 * 918),
    ]
    assert told["blocks"][1] == {
        "nodes": 2,
        "node_names": ["n1", "n2"],
        "opens": NOW,
        "closes": NOW + 1000,
        "kind": "backfill",
        "partition": "main",
        "walltime": 960,
        "node_seconds": 1836,
        "samples": None,
        "trainings": [{"name": "any", "nodes": 2, "accelerators": None, "node_seconds": 1836, "samples": None}],
    }
    assert (told["time"], told["windows"], told["proven_optimal"]) == (NOW, 3, True)
    assert told["notes"] == ["no campaign given: assuming one training job on any number of nodes", "of the plan"]
    assert source.asked == [()]


def test_a_campaign_tells_who_trains_where_and_what_that_gains(monkeypatch, campaign):
    """The second training job gets two nodes, one of which closes earlier; the first finishes before its block ends."""
    told = figures(monkeypatch, FixedSource(SURVEY), str(campaign), "--set", "most=2")
    trainings = {t["name"]: t["samples"] for block in told["blocks"] for t in block["trainings"]}
    assert trainings.keys() == {"small", "large"}
    assert trainings["small"] == 3000
    assert sum(block["samples"] for block in told["blocks"]) > 3000
    assert told["notes"] == ["of the plan"]


def test_trainings_that_may_run_fused_are_planned_as_one(monkeypatch, campaign):
    """Three training jobs, of which each could have a node: the plan is for as many, and tells that they share them."""
    file = campaign.parent / "sweep.yaml"
    file.write_text(SWEEP)
    told = figures(monkeypatch, FixedSource(SURVEY), str(file))
    trainings = {t["name"]: t["nodes"] for block in told["blocks"] for t in block["trainings"]}
    assert trainings.keys() == {"cohort-1"}
    (note, _) = told["notes"]
    assert note.startswith(
        "cohort-1: 3 training jobs that may run fused, several in a slot: rate-0.1, rate-0.2, rate-0.3"
    )


def test_the_table_has_a_row_a_block_and_the_sum(monkeypatch):
    text = run_verb(monkeypatch, plan, FixedSource(SURVEY)).stdout
    assert "Slurm, default partition: 2 blocks would be submitted at" in text
    assert "any on 2" in text
    assert "1.50 node-hours of training, after start-up" in text
    assert "1 window is unused or only partly used: freetrain explain shows why" in text


def test_where_rates_are_known_samples_are_told(monkeypatch, campaign):
    text = run_verb(monkeypatch, plan, FixedSource(SURVEY), str(campaign), "--set", "most=1").stdout
    assert "3,000" in text
    assert " samples, after start-up" in text


def test_without_windows_nothing_would_be_submitted(monkeypatch):
    result = run_verb(monkeypatch, plan, FixedSource(Survey(NOW)))
    assert result.exit_code == 0
    assert result.stdout.startswith("Slurm, default partition: nothing would be submitted at ")
    assert result.stdout.splitlines()[1] == "no nodes are idle: freetrain explain shows what they do"
    assert figures(monkeypatch, FixedSource(Survey(NOW)))["blocks"] == []


def test_blocks_of_ours_that_wait_count(monkeypatch):
    """Pending blocks count towards the limit; running ones and jobs of other programs do not."""
    states = {f"{n}": BlockState.PENDING for n in range(6)} | {"6": BlockState.HELD, "7": BlockState.RUNNING}
    blocks = {job: BlockStatus(state) for job, state in states.items()}
    jobs = {**{job: f"freetrain.x.1.block-{job}" for job in states}, "99": "other"}
    source = FixedSource(SURVEY, Survey(NOW, blocks=blocks), jobs=jobs)
    told = figures(monkeypatch, source)
    assert len(told["blocks"]) == 1
    assert told["notes"][0] == "your blocks: 1 running, 7 waiting; their nodes are in no window"
    assert source.asked == [(), tuple(sorted(states))]


def test_a_real_batch_system_is_only_looked_at(monkeypatch):
    """The source's survey of our jobs is for their driver, and may clean up after them."""
    jobs = {job: f"freetrain.x.1.block-{job}" for job in ("1", "2", "3")}
    source = FixedSource(SURVEY, jobs=jobs)
    source.state = lambda: BatchState(
        NOW,
        Scheduling("pbs"),
        running=(RunningJob("1", jobs["1"], "ann", "workq", ("n9",), None), RunningJob("8", "x", "bob", "q", (), None)),
        pending=tuple(PendingJob(job, "", "ann", "workq", 1) for job in ("2", "3", "7")),
    )
    told = figures(monkeypatch, source)
    assert told["notes"][0] == "your blocks: 1 running, 2 waiting; their nodes are in no window"
    assert source.asked == [()]


def test_what_could_never_run_is_refused_before_anything_is_asked(monkeypatch):
    source = FixedSource(SURVEY)

    def refuse(least_walltime):
        raise InvalidSettings(f"the limit is below {least_walltime:g} s")

    source.check = refuse
    result = run_verb(monkeypatch, plan, source)
    assert (result.exit_code, result.stderr, source.asked) == (2, "freetrain plan: the limit is below 100 s\n", [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml: cannot read the campaign file: No such file or directory"),
        (["--set", "a=1"], "--set a=…: the files have no ${A}; theirs are: none"),
        (["--set", "a"], "--set a: write --set name=value"),
        (["--config", "nowhere.yaml"], "--system and --config: the site file sets this; give only one of them"),
    ],
)
def test_wrong_input_is_one_line_and_asks_nothing(monkeypatch, arguments, message):
    source = FixedSource(SURVEY)
    result = run_verb(monkeypatch, plan, source, *arguments)
    assert (result.exit_code, result.stderr, source.asked) == (2, f"freetrain plan: {message}\n", [])


SIZED = "trainings: [{app: 'plan_app.py:train', name: one, accelerators: %s, scaling: {1: 5.0}}]"


def test_the_plan_of_a_site_whose_jobs_share_nodes_counts_accelerators(campaign, capsys):
    """It refuses a size that no job can have there."""
    file = campaign.parent / "sized.yaml"
    chosen = ChosenSource(FixedSource(SURVEY), "a site", slots_per_node={"": 4}, units_per_node=4)
    file.write_text(SIZED % 2)
    answer = ask_planner(chosen, str(file), Variables())
    figures = plan_figures(answer)
    assert (figures["slots_per_node"], figures["units_per_node"]) == (4, 4)
    (block,) = figures["blocks"]
    (training,) = block["trainings"]
    assert (training["name"], training["nodes"], training["accelerators"]) == ("one", 1, 2)
    assert (block["nodes"], training["node_seconds"]) == (1, 3558 / 2)  # half of n4
    print_plan(Screen(), answer, "a site")
    printed = capsys.readouterr().out
    assert "one on 2" in printed
    assert "accelerators" in printed
    file.write_text(SIZED % 3)
    with pytest.raises(InvalidApp, match="the nearest sizes are 2 and 4 accelerators"):
        ask_planner(chosen, str(file), Variables())
