"""At the site: orders are taken in once, a driver is started if there is work, and what is said is complete."""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.campaign.launch import KEEP, Process, scrubbed
from freetrain_parsl.campaign.lock import own_identity
from freetrain_parsl.campaign.owned_trainings import ASSIGNMENT, Assignment
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.globus.remote import look, verbs
from freetrain_parsl.extensions.globus.remote.archive import pack
from freetrain_parsl.extensions.globus.remote.messages import Versions
from freetrain_parsl.extensions.globus.remote.verbs import answer
from freetrain_parsl.extensions.globus.sites.places import LocalPlace
from freetrain_parsl.extensions.globus.sites.state import SiteAnswer, SiteFacts

if TYPE_CHECKING:
    from pathlib import Path

SITE = """\
system: local
checkpoints:
  directory: DIRECTORY
  globus:
    collection: aaaaaaaa-0000-4000-8000-000000000000
    path: /ft
    lease: 5 min
    home: {collection: cccccccc-0000-4000-8000-000000000000, path: /home/ft}
"""


def prepare_request(tmp_path: Path, site: str = SITE) -> dict[str, Any]:
    (tmp_path / "c.yaml").write_text("trainings: []\n")
    archive = pack({"c.yaml": tmp_path / "c.yaml"}, "c.yaml")
    return {
        "verb": "prepare",
        "run": "demo-a",
        "versions": Versions.installed().as_json(),
        "settings": [],
        "site": {"file": "here.yaml", "text": site.replace("DIRECTORY", str(tmp_path / "ft"))},
        "sha256": archive.sha256,
        "archive": base64.b64encode(archive.data).decode(),
    }


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(verbs.DIRECTORY, str(tmp_path / "runs"))
    return tmp_path / "runs" / "demo-a"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the processes that would be started."""
    commands: list[list[str]] = []
    monkeypatch.setattr(verbs, "launch", lambda _root, command, _place: commands.append(list(command)))
    return commands


def a_look(order: int, *trainings: str, start: bool = True) -> dict[str, Any]:
    return {"verb": "look", "run": "demo-a", "order": order, "trainings": list(trainings), "start": start}


def test_a_prepared_site_says_its_home_and_starts_nothing(root: Path, launched: list[Any], tmp_path: Path) -> None:
    facts = SiteFacts.parse(answer(prepare_request(tmp_path)))
    assert facts == SiteFacts("cccccccc-0000-4000-8000-000000000000:/home/ft", 300.0)
    assert answer(prepare_request(tmp_path))["lease"] == 300.0
    assert launched == []
    assert (root / "request.json").is_file()


def test_a_site_without_a_home_refuses(root: Path, launched: list[Any], tmp_path: Path) -> None:
    reply = answer(prepare_request(tmp_path, "system: local\n"))
    assert "has no checkpoints.globus" in reply["error"]
    assert reply["usage"] is True


def test_an_older_order_is_ignored_and_a_driver_is_started_only_for_work(
    root: Path, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(prepare_request(tmp_path))
    assert SiteAnswer.parse(answer(a_look(1))).order == 1
    assert launched == []  # nothing is assigned
    answer(a_look(3, "x", start=False))
    assert launched == []
    assert SiteAnswer.parse(answer(a_look(2, "y"))).order == 3
    assert Assignment.read(root / ASSIGNMENT) == Assignment(3, ("x",))
    assert launched == []  # the order was an older one
    answer(a_look(3, "x"))
    assert launched == [
        ["run", f"{root}/campaign/c.yaml", "--config", f"{root}/site/here.yaml", "--run-dir", f"{root}/run",
         "--assigned", f"{root}/{ASSIGNMENT}"]
    ]  # fmt: skip
    alive = Process(("run",), os.uname().nodename, 1, 0.0, True, None)
    monkeypatch.setattr(verbs, "process_of", lambda _root: alive)
    answer(a_look(4, "x"))
    assert len(launched) == 1  # it is starting


def test_an_ended_driver_is_resumed_for_trainings_that_have_not_ended(
    root: Path, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(prepare_request(tmp_path))
    (root / "run").mkdir()
    facts = {"name": "c", "run_id": "00ff", "created": 0.0, "campaign_file": "c", "site_file": "here.yaml",
             "site_text": (root / "site" / "here.yaml").read_text(), "variables": {}}  # fmt: skip
    store = RunStore.create(root / "run", facts, ["x", "y"])
    store.end_driver(store.begin_driver(*own_identity()), "finished")
    store.finish("x", {"loss": 1.0})
    ended = Process(("run",), os.uname().nodename, 1, 0.0, False, 0)
    monkeypatch.setattr(verbs, "process_of", lambda _root: ended)
    found = SiteAnswer.parse(answer(a_look(1, "x")))
    assert launched == []
    assert (found.trainings["x"].state, found.trainings["x"].result) == ("finished", {"loss": 1.0})
    answer(a_look(2, "x", "y"))
    assert launched == [["resume", str(root / "run")]]


def run_at(root: Path, *trainings: str) -> RunStore:
    """Make the run of an earlier driver."""
    (root / "run").mkdir()
    facts = {"name": "c", "run_id": "00ff", "created": 0.0, "campaign_file": "c", "site_file": "here.yaml",
             "site_text": (root / "site" / "here.yaml").read_text(), "variables": {}}  # fmt: skip
    return RunStore.create(root / "run", facts, list(trainings))


def test_a_training_that_has_failed_is_retried_once_for_each_request(
    root: Path, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated call retries nothing again, nor does one for a training job of another site."""
    answer(prepare_request(tmp_path))
    store = run_at(root, "x", "y")
    store.end_driver(store.begin_driver(*own_identity()), "finished")
    for name in "xy":
        store.fail(name, "ValueError: no", final=True)
    ended = Process(("run",), os.uname().nodename, 1, 0.0, False, 0)
    monkeypatch.setattr(verbs, "process_of", lambda _root: ended)
    found = SiteAnswer.parse(answer(a_look(1, "x") | {"retry": {"x": 1, "y": 1}}))
    assert ({item.name: item.state for item in store.trainings()}, found.retried) == (
        {"x": "waiting", "y": "failed"},
        {"x": 1},
    )
    assert launched == [["resume", str(root / "run")]]
    store.fail("x", "ValueError: no", final=True)
    found = SiteAnswer.parse(answer(a_look(1, "x") | {"retry": {"x": 1}}))
    assert (found.trainings["x"].state, len(launched)) == ("failed", 1)
    assert SiteAnswer.parse(answer(a_look(2, "x") | {"retry": {"x": 2}})).retried == {"x": 2}
    assert store.training("x").state == "waiting"
    assert answer(a_look(3, "x") | {"retry": {"x": "2"}})["usage"] is True


def test_a_driver_that_runs_is_stopped_for_a_retry_and_the_order_waits_for_that(
    root: Path, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(prepare_request(tmp_path))
    store = run_at(root, "x", "y")
    store.fail("x", "ValueError: no", final=True)
    driver = store.begin_driver(*own_identity())  # this process: alive
    process = Process(("run",), os.uname().nodename, 1, 0.0, True, None)
    monkeypatch.setattr(verbs, "process_of", lambda _root: process)
    monkeypatch.setattr(verbs, "_RETRY_WAIT", 0.0)
    order = a_look(1, "x", "y") | {"retry": {"x": 1}}
    found = SiteAnswer.parse(answer(order))
    assert (found.order, found.retried, store.stop_requested(), launched) == (0, {}, True, [])
    store.end_driver(driver, "stopped")
    assert SiteAnswer.parse(answer(order)).order == 1
    assert store.training("x").state == "waiting"
    assert launched == [["resume", str(root / "run")]]


def test_a_driver_that_fails_is_started_ever_more_rarely(
    root: Path, launched: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(prepare_request(tmp_path))
    failed = Process(("run",), os.uname().nodename, 1, 0.0, False, 2)
    monkeypatch.setattr(verbs, "process_of", lambda _root: failed)
    begin, starts = 1e9, []
    for second in range(0, 300, 5):
        monkeypatch.setattr(verbs.time, "time", lambda now=begin + second: now)
        before = len(launched)
        answer(a_look(1, "x"))
        starts += [second] * (len(launched) - before)
    assert starts == [0, 15, 45, 105, 225]
    answer(a_look(2, "x"))
    assert len(launched) == 6, "another order is another attempt"
    monkeypatch.setattr(verbs.time, "time", lambda: begin - 3600)
    answer(a_look(2, "x"))
    assert len(launched) == 7, "a clock that was set back delays nothing"


@pytest.mark.parametrize("request_", [a_look(1) | {"order": "1"}, a_look(1) | {"trainings": "x"}, a_look(1, "-x")])
def test_what_is_no_order_is_refused(root: Path, launched: list[Any], tmp_path: Path, request_: dict[str, Any]) -> None:
    answer(prepare_request(tmp_path))
    assert answer(request_)["usage"] is True
    assert not (root / ASSIGNMENT).exists()


def test_a_plan_that_fails_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "FREETRAIN", "import sys; sys.exit('freetrain plan: sinfo does not answer')")
    stored = {"campaign": str(tmp_path / "c.yaml"), "config": "local", "settings": []}
    assert look.planned_blocks(stored) == {"plan_error": "freetrain plan: sinfo does not answer"}


def test_a_plan_says_how_many_slots_share_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"blocks": [{"nodes": 2, "walltime": 60.0}], "slots_per_node": 4, "units_per_node": 4}
    printed = {**plan, "blocks": [{**plan["blocks"][0], "samples": 1.0}], "notes": []}
    monkeypatch.setattr(look, "FREETRAIN", f"print({json.dumps(printed)!r})")
    stored = {"campaign": str(tmp_path / "c.yaml"), "config": "local", "settings": []}
    assert look.planned_blocks(stored) == {"plan": plan}


def test_an_assignment_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / ASSIGNMENT
    assert Assignment.read(path) == Assignment()
    Assignment(2, ("a b",)).write(path)
    assert Assignment.read(path) == Assignment(2, ("a b",))
    for text in ("", "[]", "{}", '{"order": null, "trainings": []}'):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=ASSIGNMENT):
            Assignment.read(path)


def test_this_machine_answers_as_an_endpoint_does(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path / "runs")
    assert place.call({"verb": "check"})["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(InvalidInput, match="there is no run"):
        place.call(a_look(1))


def test_settings_of_the_sdk_are_passed_on_if_they_are_named() -> None:
    environment = {
        KEEP: "GLOBUS_SDK_SERVICE_URL_TRANSFER,GLOBUS_COMPUTE_CLIENT_SECRET,GLOBUS_SDK_CLIENT_SECRET",
        "GLOBUS_SDK_SERVICE_URL_TRANSFER": "http://127.0.0.1:1",
        "GLOBUS_SDK_SERVICE_URL_AUTH": "http://127.0.0.1:2",
        "GLOBUS_COMPUTE_CLIENT_SECRET": "0123456789",
        "GLOBUS_SDK_CLIENT_SECRET": "9876543210",
    }
    assert set(scrubbed(environment)) == {KEEP, "GLOBUS_SDK_SERVICE_URL_TRANSFER"}
