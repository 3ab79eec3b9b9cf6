"""The site's side without Globus and without processes: states, and what is refused before anything is written."""

from __future__ import annotations

import base64
import json
import os

import pytest

from freetrain_parsl.campaign.detached import status_of
from freetrain_parsl.campaign.launch import LOG, Process
from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.extensions.globus.remote import verbs
from freetrain_parsl.extensions.globus.remote.archive import pack
from freetrain_parsl.extensions.globus.remote.messages import Versions
from freetrain_parsl.extensions.globus.remote.verbs import answer


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Return the directory of the runs."""
    monkeypatch.setenv(verbs.DIRECTORY, str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def launched(monkeypatch):
    """Record the processes that would be started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(verbs, "launch", lambda _root, command, _place: commands.append(list(command)))
    return commands


def a_start(tmp_path, **changes):
    (tmp_path / "c.yaml").write_text("trainings: []\n")
    archive = pack({"c.yaml": tmp_path / "c.yaml"}, "c.yaml")
    request = {
        "verb": "start",
        "run": "demo-1",
        "versions": Versions.installed().as_json(),
        "settings": ["a=b"],
        "site": {"file": "here.yaml", "text": "system: local\n"},
        "sha256": archive.sha256,
        "archive": base64.b64encode(archive.data).decode(),
    }
    return {**request, **changes}


def test_a_start_unpacks_and_launches_once(base, launched, tmp_path, monkeypatch):
    assert answer(a_start(tmp_path))["state"] == "failed"  # nothing was really started
    root = base / "demo-1"
    options = ["--config", f"{root}/site/here.yaml", "--run-dir", f"{root}/run", "--set", "a=b"]
    assert launched == [["run", f"{root}/campaign/c.yaml", *options]]
    assert (root / "site" / "here.yaml").read_text() == "system: local\n"
    monkeypatch.setattr(verbs, "process_of", lambda _root: Process(("run",), os.uname().nodename, 1, 0.0, True, None))
    assert answer(a_start(tmp_path))["state"] == "starting"
    assert len(launched) == 1
    assert "is another run" in answer(a_start(tmp_path, settings=[]))["error"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "../x"}, "is not the name of a run"),
        ({"versions": {"python": "2.7", "freetrain_parsl": "0", "torch": "1.9"}}, "has other versions: Python is"),
        ({"archive": "!"}, "archive is damaged"),
        ({"archive": base64.b64encode(b"PK").decode()}, "archive is damaged"),
        ({"sha256": "0" * 64}, "archive is damaged"),
        ({"site": None}, "site must be a mapping"),
        ({"site": {"file": "../../x", "text": 3}}, None),
        ({"settings": "a=b"}, "settings must be a list"),
        ({"verb": "run_shell"}, "no remote verb 'run_shell'"),
    ],
)
def test_what_is_refused_leaves_nothing(base, launched, tmp_path, changes, message):
    reply = answer(a_start(tmp_path, **changes))
    if message is not None:
        assert message in reply["error"]
        assert reply["usage"] is True
        assert "\n" not in reply["error"]
        assert not list(base.glob("*") if base.exists() else [])
        assert launched == []


def test_other_versions_are_accepted_if_asked(base, launched, tmp_path):
    answer(a_start(tmp_path, versions={"python": "2.7"}, any_versions=True))
    assert len(launched) == 1


def test_verbs_of_a_run_that_is_not_there(base):
    for verb in ("status", "logs", "results", "stop", "resume", "clean"):
        assert "there is no run gone" in answer({"verb": verb, "run": "gone", "offset": 0})["error"]


@pytest.fixture
def store(tmp_path):
    (tmp_path / "run").mkdir()
    facts = {"name": "demo", "run_id": "1", "created": 0.0, "site_file": "s", "campaign_file": "c"}
    return RunStore.create(tmp_path / "run", facts, ["one", "two"])


def process(*command, exit_code=None, running=True, since=0.0):
    return Process(command, os.uname().nodename, 1, since, running, exit_code)


def test_before_the_driver_has_registered(tmp_path):
    assert status_of(tmp_path, process("run"), None).state == "starting"
    (tmp_path / LOG).write_text("freetrain run: c.yaml:3: unknown key 'x'\n")
    failed = status_of(tmp_path, process("run", exit_code=2, running=False), None)
    assert (failed.state, failed.message) == ("failed", "freetrain run: c.yaml:3: unknown key 'x'")
    assert status_of(tmp_path, process("run", running=False), None).state == "failed"  # it was killed
    assert status_of(tmp_path, None, None).state == "failed"


def test_a_start_on_another_login_node_is_given_time_but_not_for_ever(tmp_path):
    elsewhere = Process(("run",), "login7", 1, 1000.0, None, None)
    assert status_of(tmp_path, elsewhere, None, clock=lambda: 1100.0).state == "starting"
    assert status_of(tmp_path, elsewhere, None, clock=lambda: 3000.0).state == "failed"


def test_states_of_a_run(tmp_path, store):
    driver = store.begin_driver(*own_identity())
    assert status_of(tmp_path, process("run"), store).state == "running"
    store.request_stop()
    assert status_of(tmp_path, process("run"), store).state == "stopping"
    store.end_driver(driver, "stopped")
    assert status_of(tmp_path, process("run", exit_code=1, running=False), store).state == "stopped"
    later = store.last_driver().since + 10
    assert status_of(tmp_path, process("resume", since=later), store).state == "starting"
    assert status_of(tmp_path, process("resume", since=later, exit_code=2, running=False), store).state == "failed"
    assert status_of(tmp_path, process("clean", since=later, exit_code=0, running=False), store).state == "stopped"


def test_a_run_is_finished_only_if_all_trainings_are(tmp_path, store):
    driver = store.begin_driver(*own_identity())
    store.finish("one", 1)
    store.fail("two", "ValueError: x", final=True)
    store.end_driver(driver, "finished")
    status = status_of(tmp_path, process("run", exit_code=1, running=False), store)
    assert (status.state, status.message) == ("failed", "1 of 2 training jobs have not finished; see results")
    store.retry_failed()
    driver = store.begin_driver(*own_identity())
    store.finish("two", 2)
    store.end_driver(driver, "finished")
    assert status_of(tmp_path, process("run", exit_code=0, running=False), store).state == "finished"


def test_a_killed_driver_has_died(tmp_path, store):
    host, pid, started = own_identity()
    store.begin_driver(host, pid, started + 1)  # a process that this id had before
    status = status_of(tmp_path, process("run", running=False), store)
    assert status.state == "died"
    assert "resume continues" in status.message
    assert status.over


def test_output_is_read_in_parts(base, launched, tmp_path):
    answer(a_start(tmp_path))
    assert answer({"verb": "logs", "run": "demo-1", "offset": -1})["text"] == ""
    (base / "demo-1" / LOG).write_text("abcdef")
    part = answer({"verb": "logs", "run": "demo-1", "offset": 4})
    assert (part["text"], part["offset"]) == ("ef", 6)
    assert answer({"verb": "logs", "run": "demo-1", "offset": 99})["text"] == ""
    assert "whole number" in answer({"verb": "logs", "run": "demo-1", "offset": "x"})["error"]


def test_what_never_ran_is_not_resumed_but_can_be_deleted(base, launched, tmp_path):
    answer(a_start(tmp_path))
    assert "it never ran" in answer({"verb": "resume", "run": "demo-1"})["error"]
    reply = answer({"verb": "clean", "run": "demo-1", "delete": True})
    assert reply["done"] is True
    assert not (base / "demo-1").exists()


def test_options_are_not_smuggled_in_by_names(base, launched, tmp_path):
    answer(a_start(tmp_path))
    (base / "demo-1" / "run").mkdir()
    facts = {"name": "demo", "run_id": "1", "created": 0.0, "site_file": "s", "campaign_file": "c"}
    store = RunStore.create(base / "demo-1" / "run", facts, ["one"])
    store.end_driver(store.begin_driver(*own_identity()), "stopped")
    assert "must be a list of names" in answer({"verb": "resume", "run": "demo-1", "retry": ["--config=x"]})["error"]
    answer({"verb": "resume", "run": "demo-1", "retry": ["one"], "on_code_change": "resume"})
    assert launched[-1][2:] == ["--retry", "one", "--on-code-change", "resume"]


def test_answers_are_json(base, launched, tmp_path):
    for verb in ("check", "status", "results"):
        json.dumps(answer({"verb": verb, "run": "demo-1"}))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_damaged_files_of_a_run_are_named(base, launched, tmp_path, text):
    request = a_start(tmp_path)
    answer(request)
    (base / "demo-1" / "process.json").write_text(text)
    assert "process.json is damaged" in answer({"verb": "status", "run": "demo-1"})["error"]
    (base / "demo-1" / "process.json").unlink()
    (base / "demo-1" / "request.json").write_text(text)
    assert "error" in answer(request)


def test_what_is_in_the_way_of_a_run_is_named(base, launched, tmp_path, monkeypatch):
    (base / "demo-1").mkdir(parents=True)
    assert "is not the directory of a run" in answer(a_start(tmp_path))["error"]
    (base / "demo-1").rmdir()
    (base / "demo-1").write_text("")
    assert "Not a directory" in answer(a_start(tmp_path))["error"]
    assert "damaged" in answer(a_start(tmp_path, archive="ü"))["error"]
    monkeypatch.setenv(verbs.DIRECTORY, "/proc/nowhere")
    assert "/proc/nowhere" in answer(a_start(tmp_path))["error"]
