"""What the commands show has no escape sequences and is no markup, wherever a text comes from."""

from __future__ import annotations

import io
import json

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.commands import app
from freetrain_parsl.cli.console import Screen
from freetrain_parsl.cli.runs.campaign_view import LiveView
from freetrain_parsl.executor.training_logs import as_text
from freetrain_parsl.report.live import live_view
from freetrain_parsl.report.projection.run import RunState
from freetrain_parsl.texts import storable
from tests.cli.test_status import FACTS
from tests.extensions.pages.test_run_view import RUN

NASTY = "lr [/x] [red]\x1b]0;title\x07\x1b[2J\x9b31m\x07\u202eexe\x7f:smile:\nfreetrain: done\r\ud800"
PLAIN = "lr [/x] [red]"
FORBIDDEN = {"\x1b", "\x07", "\x9b", "\u202e", "\x7f", "\r"}


def screen(*, terminal: bool = False) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    return Screen(file=file, width=200, force_terminal=terminal, color_system=None), file


def table() -> Table:
    table = Table(title=NASTY, caption=NASTY)
    table.add_column(NASTY)
    table.add_row(NASTY)
    table.add_row(Text(NASTY, style="red"))
    return table


@pytest.mark.parametrize(
    "shown",
    [NASTY, Text(NASTY), Text("a").append(NASTY, style="red"), table(), Panel(Text(NASTY), title=Text(NASTY))],
    ids=["string", "text", "spans", "table", "panel"],
)
def test_no_part_of_what_is_shown_reaches_the_terminal_as_it_is(shown):
    console, file = screen()
    console.print(shown)
    assert PLAIN in file.getvalue()
    assert not FORBIDDEN & set(file.getvalue())


def test_a_line_is_one_line():
    console, file = screen()
    console.say(NASTY, style="bold")
    assert file.getvalue().count("\n") == 1


def test_the_sequences_of_a_live_view_are_its_own():
    """Rich moves the cursor with sequences of its own; those of a text do not get there."""
    console, file = screen(terminal=True)
    with Live(table(), console=console, auto_refresh=False) as live:
        live.update(Panel(Text(NASTY), title=Text(NASTY)), refresh=True)
    assert "\x1b[" in file.getvalue()
    for harm in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e", "\x07"):
        assert harm not in file.getvalue()


def test_styles_of_ours_stay():
    file = io.StringIO()
    Screen(file=file, force_terminal=True, color_system="standard", width=80).print("x", style="bold")
    assert file.getvalue() == "\x1b[1mx\x1b[0m\n"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make a run with bad texts in all places that a file can have them."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "freetrain-run-1"
    directory.mkdir()
    store = RunStore.create(directory, {**FACTS, "name": NASTY}, ["a", "b", "c"])
    driver = store.begin_driver(storable(NASTY), 1, 1.0)
    store.beat(driver, {"a": ("running", None, [NASTY])}, {"a": NASTY})
    store.fail("b", f"ValueError: {NASTY}", final=True)
    store.finish("c", {NASTY: NASTY})
    store.end_driver(driver, "stopped")
    logs = directory / "logs"
    logs.mkdir()
    with (logs / "a.log").open("w") as log:
        log.write(as_text(1.0, "0", f"\x1b[32mgreen\x1b[0m {NASTY}"))
        log.write("2026-11-23T01:45:17.201Z 0 of another writer \x1b]52;c;bQ==\x07\x9b2J\n")
    return directory


def test_no_command_passes_on_what_is_in_a_run(run):
    for verb in ("status", "report", "stop"):
        result = CliRunner().invoke(app, [verb, str(run)])
        assert result.exit_code == 0, result.output
        assert not FORBIDDEN & set(result.output), verb
        assert "\nfreetrain: done" not in result.output, verb
        assert PLAIN in result.output, verb


def test_json_says_what_is_there_and_is_ascii(run):
    for verb in ("status", "report"):
        result = CliRunner().invoke(app, [verb, str(run), "--json"])
        assert result.output.isascii()
        assert not FORBIDDEN & set(result.output)
        assert json.loads(result.output)["name"] == NASTY


def test_logs_pass_colours_and_nothing_else(run):
    result = CliRunner().invoke(app, ["logs", str(run), "a"])
    assert result.exit_code == 0
    assert "\x1b[32mgreen\x1b[0m lr [/x]" in result.output
    assert "of another writer" in result.output
    left = result.output.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert not FORBIDDEN & set(left)


def test_an_error_is_one_line(command, tmp_path):
    """Here with the name of a directory; a name of a file may have any bytes but two."""
    place = tmp_path / "run\x1b]0;title\x07\nfreetrain: done"
    place.mkdir()
    result = CliRunner().invoke(app, ["status", str(place)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert not FORBIDDEN & set(result.stderr)


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_views_of_a_run_pass_on_nothing(terminal):
    state = RunState()
    for at, entry in RUN:
        state.take(at, entry)
    assert state.trainings
    for training in state.trainings.values():
        training.name = NASTY
    console, file = screen(terminal=terminal)
    view = LiveView(console, NASTY)
    with view.opened():
        view.show(state, 1.0, [NASTY])
    console.print(live_view(state, {NASTY: {"kind": "main", "job": NASTY}}, 1.0, 1.0, NASTY))
    for harm in ("\x1b]0", "\x1b[2J", "\x9b", "\u202e", "\x07", "\nfreetrain: done"):
        assert harm not in file.getvalue()
