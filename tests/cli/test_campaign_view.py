"""The live view of a campaign: it fits the terminal, and without a terminal reports each change once."""

from __future__ import annotations

import io

import pytest

from freetrain_parsl.campaign.store import TrainingRecord
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import LiveView, print_trainings
from freetrain_parsl.report.projection.run import RunState, TrainingState


@pytest.fixture
def run(tmp_path):
    state = RunState(tmp_path / "none.sqlite")
    for number in range(30):
        state.trainings[f"t{number}"] = TrainingState(f"t{number}", 1, 1, 0.0)
    state.trainings["t29"].state, state.trainings["t29"].nodes = "running", ("n1",)
    return state


def test_more_trainings_than_lines_show_those_that_run_first(run) -> None:
    out = io.StringIO()
    view = LiveView(Screen(file=out, force_terminal=True, width=100, height=18), "many")
    with view.opened():
        view.show(run, 5.0)
    assert "t29" in out.getvalue()
    assert "… and 20 more: freetrain status shows all" in out.getvalue()
    assert "many · 5 s · 0 of 30 training jobs done" in out.getvalue()


def test_the_name_of_a_campaign_is_no_markup(run) -> None:
    """It ended the driver."""
    out = io.StringIO()
    view = LiveView(Screen(file=out, force_terminal=True, width=100, height=18), "[red]many[/x]")
    with view.opened():
        view.show(run, 5.0)
    assert "[red]many[/x] · 5 s" in out.getvalue()


def test_texts_of_the_user_s_do_not_change_the_terminal(run) -> None:
    """Those that UTF-8 cannot encode were a traceback."""
    file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    evil = "caf\udce9 \x1b[31mred\x1b[0m\x1b[2J\x07 end"
    console = Screen(file=file, width=120)
    print_trainings(
        console,
        [
            TrainingRecord("a", "finished", 1.0, (), evil, None),
            TrainingRecord("b", "failed", None, (), None, f"ValueError: {evil}"),
        ],
    )
    run.trainings["t3"].stalled = evil
    with (view := LiveView(console, "many")).opened():
        view.show(run, 5.0)
    file.seek(0)
    text = file.read()
    assert text.count("caf\\udce9 red") == 3
    assert not {"\x1b", "\x07"}.intersection(text)


def test_without_a_terminal_a_line_is_told_when_something_changes(run) -> None:
    out = io.StringIO()
    view = LiveView(Screen(file=out, width=40), "many")
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
        view = LiveView(Screen(file=out, force_terminal=terminal, width=120, height=60), "many")
        with view.opened():
            view.show(run, 5.0)
        assert "waits for 64 nodes" in out.getvalue()


def test_copies_to_home_are_shown_and_not_told_again_when_only_figures_change(run) -> None:
    out = io.StringIO()
    view = LiveView(Screen(file=out, width=120), "many")
    with view.opened():
        view.show(run, 5.0, ["copying to home: net, 1.5 MB of 9 GB at 3 MB/s, 60 s left"])
        view.show(run, 6.0, ["copying to home: net, 900 MB of 9 GB at 2.5 MB/s, 40 s left"])
        view.show(run, 7.0, ["completing at home: net"])
    assert [line[11:28] for line in out.getvalue().splitlines()[30:]] == ["copying to home: ", "completing at hom"]
