"""The command line of remote campaigns, against an endpoint that answers from a list."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from freetrain_parsl.cli.commands import app
from freetrain_parsl.errors import InvalidInput, RemoteError
from freetrain_parsl.extensions.globus.remote.campaign import RunRecords
from freetrain_parsl.extensions.globus.remote.compute import ComputeEndpoint
from freetrain_parsl.extensions.globus.remote.messages import Versions

ENDPOINT = "0e843812-9a83-4451-bef3-f1522edcb031"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Return the list from which calls are answered."""
    waiting: list = []

    def call(_self, request, timeout=0.0):
        answer = waiting.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer

    monkeypatch.setattr(ComputeEndpoint, "call", call)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    RunRecords().create("demo-1", ENDPOINT, tmp_path / "c.yaml")
    return waiting


def run(*arguments):
    return CliRunner().invoke(app, ["remote", *arguments])


def a_status(state: str, message: str = "", share: float | None = 0.5):
    training = {"name": "one", "state": "running", "share": share, "nodes": ["n1"], "result": None, "error": None}
    summary = {"trainings": [{**training, "remark": None}]}
    return {
        "run": "demo-1", "state": state, "host": "login1", "directory": "/d", "message": message, "summary": summary,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "code"), [("running", 0), ("finished", 0), ("stopped", 0), ("died", 1), ("failed", 1)]
)
def test_the_exit_code_says_whether_the_run_is_well(answers, state, code):
    answers.append(a_status(state, "why"))
    result = run("status")
    assert (result.exit_code, f"demo-1 {state}: why" in result.output) == (code, True)
    assert "one" in result.output
    assert "50%" in result.output


def test_answers_are_printed_as_json(answers):
    answers.append(a_status("running"))
    assert json.loads(run("status", "demo-1", "--json").output)["state"] == "running"


@pytest.mark.parametrize(("error", "code"), [(RemoteError("offline"), 1), (InvalidInput("no run"), 2)])
def test_errors_are_one_line(answers, error, code):
    answers.append(error)
    result = run("stop")
    assert result.exit_code == code
    assert result.stderr == f"freetrain remote stop: {error}\n"


def test_a_refused_campaign_sends_nothing(answers, tmp_path):
    (tmp_path / "c.yaml").write_text("trainings:\n  - ap: x\n")
    result = run("start", str(tmp_path / "c.yaml"), "--endpoint", ENDPOINT)
    assert result.exit_code == 2
    assert "c.yaml:2: trainings[1].app: is missing" in result.stderr
    assert [record.run for record in RunRecords().all()] == ["demo-1"]


def test_output_is_followed_until_the_run_ends(answers, monkeypatch):
    monkeypatch.setattr("freetrain_parsl.extensions.globus.remote.command.time.sleep", lambda _: None)
    offsets = []

    def part(text, offset, state):
        def answer(request):
            offsets.append(request["offset"])
            return {"text": text, "offset": offset, "state": state}

        return answer

    answers += [part("a\n", 2, "running"), part("", 2, "running"), part("b\n", 4, "finished")]
    assert run("logs", "--follow").output == "a\nb\n"
    assert offsets == [-1, 2, 2]


def test_results_that_are_not_complete_are_exit_code_1(answers):
    trainings = a_status("running")["summary"]["trainings"]
    answers.append({"state": "running", "trainings": trainings})
    assert run("results").exit_code == 1
    answers.append({"state": "finished", "trainings": [{**trainings[0], "state": "finished", "result": {"loss": 0.5}}]})
    result = run("results")
    assert (result.exit_code, "loss 0.5" in result.output) == (0, True)


def test_versions_of_a_site_are_compared(answers):
    answers.append({"host": "login1", "versions": Versions.installed().as_json()})
    assert run("check", "--endpoint", ENDPOINT).exit_code == 0
    answers.append({"host": "login1", "versions": {"python": "2.7"}})
    result = run("check", "--endpoint", ENDPOINT)
    assert (result.exit_code, "Python is 2.7 there and" in result.output) == (1, True)


def test_deleting_a_run_forgets_it(answers):
    answers.append({"done": True, "message": "no remaining jobs; /d is deleted"})
    assert run("clean", "--delete").output == "no remaining jobs; /d is deleted\n"
    assert run("list").output == ""
