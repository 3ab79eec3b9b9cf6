"""`freetrain check`: what it prints, its exit codes, and when it is suggested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freetrain_parsl.cli.commands import app
from freetrain_parsl.executor.check_suggestion import check_suggestion
from freetrain_parsl.extensions.checking.run import Checker, call_of
from freetrain_parsl.storage.checked_code import note_checked, state_directory, take_unchecked
from freetrain_parsl.training.checkpoints.code.code_identity import code_of
from tests.extensions.checking import corpus

CORPUS = Path(__file__).with_name("corpus.py")


def check(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("freetrain_parsl.storage.checked_code._noted", set())


@pytest.mark.smoke
@pytest.mark.slow
def test_a_function_that_holds_is_exit_code_0_and_values_are_those_of_campaigns():
    result = check(f"{CORPUS}:regression", "--set", "width=4", "--set", "rates=[0.1, 0.2]")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("regression (corpus.py:")
    assert "survives being moved: all 6 comparisons hold" in result.stdout


@pytest.mark.smoke
@pytest.mark.slow
def test_a_cause_is_exit_code_1_and_json_names_it():
    result = check(f"{CORPUS}:iterator", "--json")
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert report["verdict"] == "differs"
    (finding,) = report["findings"]
    assert finding["name"] == "numbers"
    assert [row["holds"] for row in report["rows"]].count(False) >= 2


@pytest.mark.slow
def test_a_function_that_does_not_run_is_exit_code_2(tmp_path):
    (tmp_path / "broken.py").write_text("def train(session):\n    raise KeyError('x')\n")
    result = check(f"{tmp_path}/broken.py:train")
    assert result.exit_code == 2
    assert "train (broken.py:1) does not run" in result.stdout
    assert "KeyError: 'x' (broken.py:2)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus.py"], "an app is named 'module:function' or 'path.py:function'"),
        (["none.py:train"], "no such file: "),
        ([f"{CORPUS}:regresion"], "has no function 'regresion' (did you mean 'regression'?)"),
        ([f"{CORPUS}:regression", "--set", "width"], "--set width: write --set name=value"),
        ([f"{CORPUS}:regression", "--set", "wide=4"], "takes no argument 'wide' (did you mean 'width'?)"),
        ([f"{CORPUS}:regression", "--set", "width=[4"], "--set width:"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    result = check(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.startswith("freetrain check: ")
    assert len(result.stderr.splitlines()) == 1


def trained(session):
    """Stand for a training function."""


def test_a_check_is_suggested_once_for_each_code():
    code = code_of(trained)
    line = check_suggestion([(trained, code), (trained, code)])
    assert line.startswith("never checked whether it survives being moved: freetrain check ")
    assert line.endswith("test_check.py:trained")
    assert check_suggestion([(trained, code)]) == ""
    assert check_suggestion([(trained, None)]) == ""


def test_what_was_checked_is_remembered_by_later_processes(monkeypatch):
    note_checked("d1", "train")
    monkeypatch.setattr("freetrain_parsl.storage.checked_code._noted", set())
    assert take_unchecked({"d1": "train", "d2": "other"}) == ["d2"]
    assert (state_directory() / "checked-code").read_text() == "d1 train\nd2 other\n"
    assert [path.name for path in state_directory().iterdir()] == ["checked-code"]


def test_a_state_directory_that_cannot_be_used_only_forgets(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert take_unchecked({"d1": "train"}) == ["d1"]
    assert take_unchecked({"d1": "train"}) == [], "at least in this process"


def test_a_mistake_is_a_report_where_json_is_asked_for():
    result = check("none.py:train", "--json")
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert report["verdict"] == "does not run"
    assert "no such file: " in report["failure"]
    assert result.stderr.startswith("freetrain check: no such file: ")


def test_an_interruption_is_said(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("freetrain_parsl.extensions.checking.run.Checker.run", interrupted)
    result = check(f"{CORPUS}:regression")
    assert (result.exit_code, result.stderr) == (130, "freetrain check: interrupted; its processes were ended\n")


@pytest.mark.slow
def test_what_is_compared_is_said_while_it_runs():
    said = []
    report = Checker(call_of(corpus.regression), progress=said.append).run()
    assert len(said) == len(report.rows) + 1
    assert (said[0], said[-1]) == ("one process", "two members of one array")


READS_ITS_FILE = """
import torch


def train(session):
    x = torch.randn(64, 4)
    model, _ = session.prepare(torch.nn.Linear(4, 1), torch.optim.SGD, lr=0.1)
    data = session.loader(torch.utils.data.TensorDataset(x), batch_size=8)
    for _ in session.epochs(2):
        for (rows,) in data:
            session.step(model(rows).square().mean())
            if session.world_size > 1:
                raise EOFError  # as torch.load of a file that is being written
"""


@pytest.mark.slow
def test_a_file_that_several_processes_write_is_told_as_a_cause(tmp_path):
    (tmp_path / "reads.py").write_text(READS_ITS_FILE)
    result = check(f"{tmp_path}/reads.py:train")
    assert result.exit_code == 1, result.output
    assert "On 2 processes: EOFError (reads.py:" in result.stdout
    assert "if session.is_main_process:" in result.stdout
