"""What is shown of a run: as text and as HTML, without a kernel."""

from __future__ import annotations

import builtins
import threading
from concurrent.futures import Future

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.notebook.launch import environment_of_user, run_command
from freetrain_parsl.notebook.live import LiveDisplay, in_kernel
from freetrain_parsl.notebook.run import WatchedRun
from freetrain_parsl.notebook.shown import ShownFutures
from freetrain_parsl.notebook.snapshot import RunSnapshot, TrainingRow
from freetrain_parsl.notebook.timeline import stays_of, timeline_picture
from freetrain_parsl.notebook.values import TextLines, outcome_row, results_table
from freetrain_parsl.notebook.watching import watch

HOSTILE = "<script>alert('1')</script>"


def snapshot(*rows: TrainingRow, state="running", notes=()) -> RunSnapshot:
    return RunSnapshot("sweep", state, "/runs/1", rows, 0.0, notes, over=state == "finished")


def test_text_has_one_line_for_each_training():
    """The columns are aligned, and the head counts the trainings."""
    rows = (TrainingRow("a", "finished", 1.0, 3, 0.25, "loss 0.25"), TrainingRow("long-name", "waiting"))
    head, titles, first, second = snapshot(*rows).text().splitlines()
    assert head.startswith("sweep: running, 1 of 2 trainings finished, in /runs/1, at ")
    assert titles.split("  ")[0] == "training"
    assert first == "a          finished  100%  3      0.2500  loss 0.25"
    assert second == "long-name  waiting"


def test_what_trainings_say_is_never_markup():
    """Names, errors and logs come from files and user code."""
    page = snapshot(TrainingRow(HOSTILE, "failed", note=HOSTILE), notes=(HOSTILE,)).html()
    page += TextLines((HOSTILE,))._repr_mimebundle_()["text/html"]
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 4


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


def test_results_are_a_data_frame():
    """Rows are named by the trainings; a value that a training does not have is missing."""
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


def test_a_display_updates_only_what_has_changed_and_ends_with_the_run(monkeypatch):
    """Reading the same state again sends nothing; an unreadable run is tried again; the last state is shown."""
    waiting = snapshot(TrainingRow("a", "waiting"))
    finished = snapshot(TrainingRow("a", "finished"), state="finished")
    states = iter([waiting, waiting, OSError("gone for now"), finished])
    shown: list[str] = []

    class Handle:
        def update(self, bundle, *, raw):
            shown.append(bundle["text/plain"])

    def read():
        state = next(states)
        if isinstance(state, OSError):
            raise state
        return state

    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle["text/plain"]) or Handle())
    display = LiveDisplay(read, lambda state: {"text/plain": state.state}, pause=lambda seconds: False)
    display.open()
    for thread in threading.enumerate():
        if thread.name == "freetrain-notebook":
            thread.join(10)
    assert shown == ["running", "finished"]


def test_the_environment_of_a_driver_is_that_of_the_user():
    """Secrets of the notebook's server and settings of the kernel stay; the user's own variables travel."""
    kernel = {"JPY_API_TOKEN": "s", "JUPYTERHUB_API_TOKEN": "s", "FORCE_COLOR": "1", "MPLBACKEND": "module://inline"}
    user = {"PATH": "/bin", "HF_TOKEN": "mine", "SCRATCH": "/scratch"}
    assert environment_of_user(kernel | user) == user
    assert environment_of_user({"MPLBACKEND": "agg"}) == {"MPLBACKEND": "agg"}


def test_a_refused_command_is_one_line_without_the_name_of_the_command(tmp_path):
    """The reader of a notebook has not typed it."""
    with pytest.raises(InvalidInput, match=rf"^{tmp_path}/none\.yaml: cannot read the campaign file"):
        run_command(["run", str(tmp_path / "none.yaml"), "--detach"])


def test_stays_last_from_start_to_end_of_a_block(tmp_path):
    """A block that has not ended lasts until the last entry; an unused run is described."""
    from freetrain_parsl.executor.journal import JournalEntry

    entries = [
        JournalEntry(1.0, "block_started", "b1", {"nodes": ["n1", "n2"], "ends": None}),
        JournalEntry(2.0, "block_started", "b2", {"nodes": ["n3"], "ends": None}),
        JournalEntry(5.0, "block_ended", "b1", {"nodes": ["n1", "n2"], "reason": "walltime"}),
        JournalEntry(9.0, "clock_stepped", "", {"seconds": 1.0, "lead": 0.0}),
    ]
    assert [(stay["node"], stay["start"], stay["end"]) for stay in stays_of(entries)] == [
        ("n1", 1.0, 5.0),
        ("n2", 1.0, 5.0),
        ("n3", 2.0, 9.0),
    ]
    assert timeline_picture([], "sweep").png is None
