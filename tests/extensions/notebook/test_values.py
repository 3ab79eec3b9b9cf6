"""What is shown of a run: as text and as HTML, without a kernel."""

from __future__ import annotations

import builtins
import itertools
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import Journal
from freetrain_parsl.extensions.notebook.control import controller_of, environment_of_user, run_command, take_control
from freetrain_parsl.extensions.notebook.live import LiveDisplay, bundle_of, in_kernel
from freetrain_parsl.extensions.notebook.pictures import curves_picture, stays_of, timeline_picture
from freetrain_parsl.extensions.notebook.run import WatchedRun
from freetrain_parsl.extensions.notebook.shown import ShownFutures
from freetrain_parsl.extensions.notebook.snapshot import RunSnapshot, TrainingRow
from freetrain_parsl.extensions.notebook.values import Picture, TextLines, outcome_row, results_table
from freetrain_parsl.extensions.notebook.watching import watch
from freetrain_parsl.extensions.pages.run_view import RunView
from freetrain_parsl.protocol import journal as record
from freetrain_parsl.report.curves import draw_curves
from freetrain_parsl.report.run_reader import DriverJournal, RunReader

HOSTILE = "<script>alert('1')</script>"


def snapshot(*rows: TrainingRow, state="running", notes=()) -> RunSnapshot:
    return RunSnapshot("sweep", state, "/runs/1", rows, 0.0, notes, over=state == "finished")


def test_text_has_one_line_for_each_training():
    """The columns are aligned, and the head counts the training jobs."""
    rows = (TrainingRow("a", "finished", 1.0, 3, 0.25, "loss 0.25"), TrainingRow("long-name", "waiting"))
    head, titles, first, second = snapshot(*rows).text().splitlines()
    assert head.startswith("sweep: running, 1 of 2 training jobs finished, in /runs/1, at ")
    assert titles.split("  ")[0] == "training"
    assert first == "a          finished  100%  3      0.2500  loss 0.25"
    assert second == "long-name  waiting"


def test_what_trainings_say_is_never_markup():
    """Names, errors and logs come from files and user code."""
    page = snapshot(TrainingRow(HOSTILE, "failed", note=HOSTILE), notes=(HOSTILE,)).html()
    page += TextLines((HOSTILE,))._repr_mimebundle_()["text/html"]
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 4


NASTY = "lr [/x] $\\frac{x_{$ \x1b]0;title\x07\x1b[2J\x9b31m\x07\u202eexe\x7f\nstarted run\ud800"
FORBIDDEN = {"\x1b", "\x07", "\x9b", "\u202e", "\x7f", "\ud800"}


def test_texts_of_a_run_are_lines_without_escape_sequences_in_cells_and_in_terminals():
    rows = (TrainingRow(NASTY, "running", note=NASTY), TrainingRow("n" * 10**6, "failed", note="e" * 10**6))
    snapshot = RunSnapshot(NASTY, "running", NASTY, rows, 0.0, notes=(NASTY,))
    for shown in (
        snapshot.text(),
        snapshot.html(),
        str(Picture(NASTY)),
        str(bundle_of(snapshot, [Picture(NASTY, b"")])),
    ):
        assert not FORBIDDEN & set(shown)
        assert "\nstarted run" not in shown
        assert "lr [/x]" in shown
    assert len(snapshot.text().splitlines()) == 5
    assert len(snapshot.text()) < 3000


def test_lines_of_a_log_keep_their_colours_in_a_terminal_only():
    lines = TextLines((f"\x1b[32mgreen\x1b[0m {NASTY}",))
    shown = lines._repr_mimebundle_()
    assert shown["text/plain"].startswith("\x1b[32mgreen\x1b[0m lr")
    assert not FORBIDDEN & set(shown["text/plain"].replace("\x1b[32m", "").replace("\x1b[0m", ""))
    assert not FORBIDDEN & set(shown["text/html"])
    assert shown["text/html"].startswith("<pre>green lr")


def test_thousands_of_trainings_are_shown_in_part():
    """An output cell stays small; the number of the others is stated."""
    view = snapshot(*(TrainingRow(f"t{number}", "waiting") for number in range(5000)))
    assert len(view.html()) < 30_000
    assert "… and 4900 more; results() has all" in view.text()


def test_an_error_of_many_lines_is_cut():
    """A traceback in an error does not fill the table."""
    cells = TrainingRow("a", "failed", note="x" * 1000).cells()
    assert len(cells[-1]) == 200
    assert cells[-1].endswith("…")


def test_results_have_columns_for_numbers_and_keep_the_others_apart():
    """A metric named as a column of ours is not lost; containers in a result are left out."""
    row = outcome_row("a", "finished", 1.0, {"loss": 0.5, "state": "done", "history": [1]}, None)
    assert row == {"training": "a", "state": "finished", "done": 1.0, "loss": 0.5, "result.state": "done"}
    assert outcome_row("b", "failed", 0.2, None, "ValueError: no")["error"] == "ValueError: no"
    assert outcome_row("c", "finished", 1.0, [1, 2], None)["result"] == [1, 2]


def test_numbers_of_numpy_are_numbers_of_a_result():
    """They were left out, as was all that is neither a number nor a text."""
    result = {"loss": np.float32(0.5), "steps": np.int64(3), "best": np.array(2.5), "all": np.array([1.0])}
    row = outcome_row("a", "finished", 1.0, result, None)
    assert row == {"training": "a", "state": "finished", "done": 1.0, "loss": 0.5, "steps": 3, "best": 2.5}
    assert outcome_row("a", "finished", 1.0, np.float32(0.5), None)["result"] == 0.5
    future: Future[object] = Future()
    future.set_result(result)
    assert ShownFutures({"a": future}, Path("none"), Path()).snapshot().rows[0].state == "finished"


def test_results_are_a_data_frame():
    """Rows are named by the training jobs; a value that a training job does not have is missing."""
    frame = results_table([{"training": "a", "loss": 0.5}, {"training": "b", "error": "no"}])
    assert list(frame.columns) == ["loss", "error"]
    assert frame.loc["a", "loss"] == 0.5
    assert frame.isna().loc["b", "loss"]


def test_results_are_rows_without_pandas(monkeypatch):
    """Pandas is not a requirement."""
    monkeypatch.setattr(builtins, "__import__", refusing("pandas"))
    assert results_table([{"training": "a"}]) == [{"training": "a"}]


def refusing(package):
    real = builtins.__import__

    def import_(name, *arguments, **more):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **more)

    return import_


def test_outside_a_kernel_runs_are_printed(monkeypatch, capsys, tmp_path):
    """Without IPython, a run is printed as text; nothing fails."""
    future: Future[dict[str, float]] = Future()
    future.set_result({"loss": 0.5})
    monkeypatch.setattr(builtins, "__import__", refusing("IPython"))
    assert not in_kernel()
    source = ShownFutures({"a": future}, tmp_path / "journal.sqlite", tmp_path, clock=lambda: 0.0)
    run = WatchedRun(source)
    run.show()
    assert "a         finished" in capsys.readouterr().out
    assert run.wait() == "ended"
    assert "no node has been used yet" in repr(run.timeline())


@pytest.mark.parametrize("what", [[], [3], 3, {}])
def test_watch_refuses_what_it_cannot_show(what):
    """The message says what it takes."""
    with pytest.raises(InvalidInput, match=r"^watch\(…\): "):
        watch(what)


def test_watch_refuses_a_directory_that_is_no_run(tmp_path):
    """The directory is named."""
    with pytest.raises(InvalidInput, match="is not a run directory"):
        watch(tmp_path)


class _States:
    """A run whose states are given in order; an error is raised."""

    def __init__(self, *states):
        self._states = iter(states)

    def snapshot(self):
        state = next(self._states)
        if isinstance(state, Exception):
            raise state
        return state

    def changes(self, version=0):
        return RunView("sweep").since(version)


def displayed(monkeypatch, *states, seconds, pictures=lambda: (Picture("none"),)):
    """Open a display of a run and return what its output shows, one after the other, until its thread ends."""
    shown = []
    ticks = itertools.count(step=seconds)

    class Handle:
        def update(self, bundle, *, raw):
            shown.append(bundle)

    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle) or Handle())
    display = LiveDisplay(_States(*states), pictures, pause=lambda _: False, clock=lambda: float(next(ticks)))
    display.open()
    display.settle()
    return shown


WAITING, FINISHED = snapshot(TrainingRow("a", "waiting")), snapshot(TrainingRow("a", "finished"), state="finished")
RUNNING = snapshot(TrainingRow("a", "running"))


def test_a_table_is_updated_when_something_has_changed(monkeypatch):
    """The same state is not sent again, an unreadable run is named and tried again, the last state ends the updates."""
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "freetrain_parsl.extensions.notebook.widget", raising=False)
    states = (WAITING, WAITING, OSError("gone for now"), RUNNING, RUNNING, FINISHED)
    shown = displayed(
        monkeypatch, *states, seconds=3, pictures=lambda: (Picture("nodes", b"png"), Picture("curves", b"abc"))
    )
    assert [bundle["text/plain"].split(",")[0] for bundle in shown] == [
        "sweep: running",
        "sweep: running",
        "sweep: running",
        "sweep: finished",
    ]
    assert "\ngone for now\n" in shown[1]["text/plain"]
    assert "gone for now" not in shown[2]["text/plain"]
    assert "a         running" in shown[2]["text/plain"]
    assert "data:image/png;base64,cG5n" in shown[3]["text/html"]
    assert "<img alt='curves' src='data:image/png;base64,YWJj'>" in shown[3]["text/html"]
    assert not any(kind.startswith("application/") for bundle in shown for kind in bundle)


def test_a_widget_is_replaced_only_at_the_end(monkeypatch):
    """Each update of the output would draw the view anew, with what the reader has chosen in it lost."""
    shown = displayed(monkeypatch, WAITING, RUNNING, RUNNING, FINISHED, seconds=3)
    assert ["application/vnd.jupyter.widget-view+json" in bundle for bundle in shown] == [True, False]


def test_a_run_that_is_over_is_shown_once(monkeypatch):
    """Nothing follows it."""
    assert len(displayed(monkeypatch, FINISHED, seconds=1)) == 1


def test_the_environment_of_a_driver_is_that_of_the_user():
    """Secrets of the notebook's server and settings of the kernel stay; the user's own variables travel."""
    kernel = {"JPY_API_TOKEN": "s", "JUPYTERHUB_API_TOKEN": "s", "FORCE_COLOR": "1", "MPLBACKEND": "module://inline"}
    user = {"PATH": "/bin", "HF_TOKEN": "mine", "SCRATCH": "/scratch"}
    assert environment_of_user(kernel | user) == user
    assert environment_of_user({"MPLBACKEND": "agg"}) == {"MPLBACKEND": "agg"}


@pytest.mark.slow
def test_a_refused_command_is_one_line_without_the_name_of_the_command(tmp_path):
    """The reader of a notebook has not typed it."""
    with pytest.raises(InvalidInput, match=rf"^{tmp_path}/none\.yaml: cannot read the campaign file"):
        run_command(["run", str(tmp_path / "none.yaml"), "--detach"])


def test_the_timeline_has_the_jobs_of_others_as_the_page_has(tmp_path):
    """On Slurm, too, where no accounting of all jobs is at hand; what an unfinished driver had lasts until now."""
    window = {"nodes": ["n1", "n2"], "opens": 0.0, "closes": 90.0}
    seen = [{"type": "windows_seen", "time": 0.0, "windows": windows} for windows in ([window], [])]
    view = RunView("sweep")
    view.take(
        [
            (1.0, record.PlannerStep("", seen[:1], [])),
            (2.0, record.BlockStarted("b1", ["n1"], None)),
            (5.0, record.BlockEnded("b1", ["n1"], "walltime")),
            (6.0, record.PlannerStep("", seen[1:], [])),
            (7.0, record.NodeJoined("n3", "b2", 90.0)),
            (9.0, record.ClockStepped("", 1.0, 0.0)),
        ]
    )
    stays = [tuple(stay.values()) for stay in stays_of(view.since())]
    assert sorted(stays) == [
        ("n1", "main", 6.0, 9.0),
        ("n1", "preemptible", 2.0, 5.0),
        ("n2", "main", 6.0, 9.0),
        ("n3", "preemptible", 7.0, 9.0),
    ]


def test_a_timeline_of_a_large_machine_has_our_nodes_and_some_others():
    others = [f"other-{number:03}" for number in range(200)]
    window = {"nodes": ["ours", *others], "opens": 0.0, "closes": 90.0}
    view = RunView("sweep")
    for second, windows in ((1.0, [window]), (2.0, [])):
        event = {"type": "windows_seen", "time": second, "windows": windows}
        view.take([(second, record.PlannerStep("", [event], []))])
    assert stays_of(view.since()) == []  # we had none
    view.take([(3.0, record.BlockStarted("b1", ["ours"], None))])
    nodes = {stay["node"] for stay in stays_of(view.since())}
    assert ("ours" in nodes, len(nodes)) == (True, 64)


def test_a_run_without_nodes_and_steps_has_no_pictures():
    view = RunView("sweep")
    assert timeline_picture(view, "sweep").png is None
    assert curves_picture(view.since(), "sweep").png is None


def test_the_fragments_of_a_killed_driver_end_with_its_journal(tmp_path, monkeypatch):
    """They were drawn over what the next driver did; a damaged journal is named."""
    drawn = []
    monkeypatch.setattr(
        "freetrain_parsl.extensions.notebook.pictures._drawn", lambda text, draw: drawn.append(draw) or Picture(text)
    )
    monkeypatch.setattr("freetrain_parsl.report.timeline.draw_timeline", lambda run, *_, **__: drawn.append(run))
    paths = [tmp_path / "1.sqlite", tmp_path / "2.sqlite"]
    for path, begin in zip(paths, (0.0, 100.0), strict=True):
        journal = Journal(path)
        journal.write(begin, record.TrainingSubmitted("a", 1, 1, None))
        journal.write(begin, record.BlockStarted("b", ["n1"], None))
        journal.write(begin + 1, record.FragmentStarted("a", 1, ["n1"], in_place=False, paused=0.0))
        journal.write(begin + 9, record.Checkpoint("a", 5))
        journal.close()
    reader = RunReader(RunView("sweep"), lambda: [DriverJournal(path, "killed") for path in paths])
    assert str(timeline_picture(reader.refresh(), "sweep")) == "sweep: 2 fragments on 1 nodes"
    drawn[0](tmp_path)
    assert [(fragment.start, fragment.end) for fragment in drawn[1].fragments] == [(1.0, 9.0), (101.0, 109.0)]
    paths[1].write_bytes(b"no database" * 100)
    assert f"the journal {paths[1]} cannot be read" in str(timeline_picture(reader.refresh(), "sweep"))


@pytest.mark.slow  # imports matplotlib
def test_the_curves_of_a_run_are_a_picture_with_the_loss_first(tmp_path):
    """Of a run that has ended, a saved notebook has them, too."""
    view = RunView("sweep")
    view.take(
        [
            (1.0, record.TrainingSubmitted("a", 1, 1, None)),
            (2.0, record.ValuesSampled("a", 10, {"accuracy": 0.5})),
            (2.0, record.ValuesSampled("a", 10, {"loss": 0.5})),
            (3.0, record.ValuesSampled("a", 20, {"loss": 0.4})),
        ]
    )
    picture = curves_picture(view.since(), "sweep")
    assert picture.png is not None
    assert picture.png.startswith(b"\x89PNG")
    seen = view.since()
    assert draw_curves(seen["curves"], ["a"], tmp_path / "curves.svg", title="t") == ("loss", "accuracy")
    assert "accuracy" in (tmp_path / "curves.svg").read_text()


@pytest.mark.slow
def test_one_process_controls_a_run_at_a_time(tmp_path):
    """Another process is refused until the first ends; the same one may ask again."""
    code = (
        "import sys; from pathlib import Path; from freetrain_parsl.extensions.notebook.control import take_control\n"
    )
    code += "print(take_control(Path(sys.argv[1])), flush=True); input()"

    def other():
        return subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    assert controller_of(tmp_path) == ""
    with other() as first:
        assert first.stdout.readline() == "True\n"
        assert not take_control(tmp_path)
        assert controller_of(tmp_path) == f"process {first.pid} on {platform.node()}"
        first.kill()
    assert take_control(tmp_path)
    assert take_control(tmp_path)
    with other() as second:
        assert second.stdout.readline() == "False\n"
        second.communicate("\n")


def test_a_cell_and_the_display_read_a_run_one_after_the_other(tmp_path):
    """They are different threads, and what has changed is made from tables that a reader adds to."""
    journal = Journal(tmp_path / "journal.sqlite")
    source = ShownFutures({}, journal.path, tmp_path)
    inside = []

    class View:
        def since(self, version):
            inside.append(True)
            time.sleep(0.02)
            inside.pop()
            return {"version": version + len(inside)}

    source._reader.refresh = View
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(source.changes, [1] * 4))
    journal.close()
    assert found == [{"version": 1}] * 4


def test_a_run_directory_that_was_removed_and_made_again_has_a_lock_of_its_own(tmp_path):
    """The lock of the removed file keeps no other notebook from it."""
    run_dir = tmp_path / "run"
    for _ in range(2):
        run_dir.mkdir()
        assert take_control(run_dir)
        assert "process" in controller_of(run_dir)
        shutil.rmtree(run_dir)
    assert not take_control(run_dir), "it cannot be written"


def test_a_widget_sends_changes_and_everything_when_it_is_asked():
    """A browser that has missed changes gets all of them, based on nothing."""
    from freetrain_parsl.extensions.notebook.widget import RunWidget

    view = RunView("sweep")
    widget = RunWidget(view.since)
    assert (widget.change["base"], widget.change["delta"]["reset"]) == (0, True)
    sent = widget.change["delta"]["version"]
    view.take([(1.0, record.TrainingSubmitted("a", 1, 2, 100))])
    widget.push("starting")
    first = widget.change
    assert first["base"] == sent
    assert first["delta"]["trainings"]["name"] == ["a"]
    assert widget.line == "starting"
    view.take([(2.0, record.TrainingSubmitted("b", 1, 2, 100))])
    widget.push()
    assert widget.change["base"] == first["delta"]["version"]
    assert widget.change["delta"]["trainings"]["name"] == ["b"]
    same = widget.change
    widget.push()
    assert widget.change is same, "nothing has changed"
    widget._on_message(widget, {"want": "everything"}, [])
    assert widget.change["base"] == 0
    assert widget.change["delta"]["trainings"]["name"] == ["a", "b"]


def test_the_themes_of_a_notebook_have_the_colours_of_the_page():
    """They are taken from the page's style sheet."""
    from freetrain_parsl.extensions.notebook.widget import RunWidget

    light, dark = RunWidget._css.split('body[data-jp-theme-light="true"]')[1].split('body[data-jp-theme-light="false"]')
    assert "--ft-page: #ffffff" in light
    assert "--ft-page: #14171b" in dark
