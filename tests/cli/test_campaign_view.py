"""The live view of a campaign: it fits the terminal, and without a terminal reports each change once."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from freetrain_parsl.cli.campaign_view import LiveView
from freetrain_parsl.report.run import RunState, TrainingState


@pytest.fixture
def run(tmp_path):
    state = RunState(tmp_path / "none.sqlite")
    for number in range(30):
        state.trainings[f"t{number}"] = TrainingState(f"t{number}", 1, 1, 0.0)
    state.trainings["t29"].state, state.trainings["t29"].nodes = "running", ("n1",)
    return state


def test_more_trainings_than_lines_show_those_that_run_first(run) -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=100, height=18), "many")
    with view.opened():
        view.show(run, 5.0)
    assert "t29" in out.getvalue()
    assert "… and 20 more: freetrain status shows all" in out.getvalue()
    assert "many · 5 s · 0 of 30 trainings done" in out.getvalue()


def test_without_a_terminal_a_line_is_told_when_something_changes(run) -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=40), "many")
    with view.opened():
        view.show(run, 5.0)
        view.show(run, 6.0)
        run.trainings["t29"].state, run.trainings["t29"].nodes = "finished", ()
        view.show(run, 7.0)
    lines = out.getvalue().splitlines()
    assert len(lines) == 31
    assert lines[29] == "    5.0 s  t29            running on n1"
    assert lines[30] == "    7.0 s  t29            finished"


def test_why_a_training_does_not_get_on_is_told_with_and_without_a_terminal(run) -> None:
    run.trainings["t3"].stalled = "waits for 64 nodes"
    for terminal in (True, False):
        out = io.StringIO()
        view = LiveView(Console(file=out, force_terminal=terminal, width=120, height=60), "many")
        with view.opened():
            view.show(run, 5.0)
        assert "waits for 64 nodes" in out.getvalue()


def test_copies_to_home_are_shown_and_not_told_again_when_only_figures_change(run) -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=120), "many")
    with view.opened():
        view.show(run, 5.0, ["copying to home: net, 1.5 MB of 9 GB at 3 MB/s, 60 s left"])
        view.show(run, 6.0, ["copying to home: net, 900 MB of 9 GB at 2.5 MB/s, 40 s left"])
        view.show(run, 7.0, ["completing at home: net"])
    assert [line[11:28] for line in out.getvalue().splitlines()[30:]] == ["copying to home: ", "completing at hom"]
