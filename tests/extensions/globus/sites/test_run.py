"""The loop around the coordinator: run directory, resume, stop, and sites that hang; with places of this process."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.cli.verbs import app_of
from freetrain_parsl.errors import CollectionUnavailable, InvalidInput, RemoteError
from freetrain_parsl.extensions.globus.remote import archive, preparation
from freetrain_parsl.extensions.globus.sites import coordinator as coordinator_module
from freetrain_parsl.extensions.globus.sites import run as run_module
from freetrain_parsl.extensions.globus.sites.places import LocalPlace
from freetrain_parsl.extensions.globus.sites.run import SitesRun
from freetrain_parsl.extensions.globus.sites.state import COORDINATOR, CoordinatorFile, site_lines
from freetrain_parsl.extensions.globus.sites.view import SitesView, coordinate_and_report

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from freetrain_parsl.extensions.globus.sites.coordinator import Coordinator
    from freetrain_parsl.extensions.globus.sites.planning.model import SitePlan, SitesQuestion, SitesSettings

APP = "from freetrain_parsl import training_app\n\n@training_app\ndef train(session, *, lr=0.1):\n    pass\n"
CAMPAIGN = "name: two\ntrainings:\n  - {app: sites_app.py:train, name: 't{lr}', grid: {lr: [1, 2]}}\n"
pytestmark = pytest.mark.slow  # a second between two looks

SITE = """\
system: local
checkpoints:
  directory: /scratch/ft
  globus:
    collection: aaaaaaaa-0000-4000-8000-000000000000
    path: /ft
    home: {collection: cccccccc-0000-4000-8000-000000000000, path: /home/ft}
"""
SITES = "look: 1 s\nstatus: 1 s\nsites:\n  - {name: a, config: a.yaml}\n  - {name: b, config: b.yaml}\n"


class ScriptedSite:
    """A site that finishes what it is given at once, hangs, or refuses."""

    def __init__(self, *, nodes: int = 1, finishes: bool = True, error: Exception | None = None) -> None:
        self.nodes = nodes
        self.finishes = finishes
        self.error = error
        self.hangs: threading.Event | None = None
        self.stops_as = "stopped"
        self.ends_as = "finished"
        self.retry: dict[str, int] = {}
        self.order, self.assigned = 0, []
        self.verbs: list[str] = []
        self.slots = {"slots_per_node": 1, "units_per_node": 1}
        self.also: dict[str, Any] = {}  # in every answer to a look

    def call(self, request: Mapping[str, Any], timeout: float = 120.0) -> dict[str, Any]:
        self.verbs.append(request["verb"])
        if self.hangs is not None:
            self.hangs.wait(20)
        if self.error is not None:
            raise self.error
        facts = {"home": "h", "lease": 900.0}
        match request["verb"]:
            case "prepare":
                return {**facts, "host": "x"}
            case "stop":
                return self.status(self.stops_as)
        self.retry = request["retry"]
        if request["order"] > self.order:
            self.order, self.assigned = request["order"], request["trainings"]
        measured: list[Any] = []
        blocks = [{"nodes": self.nodes, "walltime": 600}]
        plan = {"plan": {"blocks": blocks, **self.slots}} if request["plan"] else {}
        more = {"held": [], "sizes": {}, "samples_left": {}, "measured": measured, "copying": [], "retried": {}}
        status = {**self.status("running"), "run": request["run"]}
        return {**facts, **more, **plan, "order": self.order, "status": status, **self.also}

    def status(self, state: str) -> dict[str, Any]:
        trainings = [
            {"name": name, "state": self.ends_as if self.finishes else "running", "share": 0.5, "nodes": [],
             "result": {"loss": 1.5}, "error": None, "remark": None}
            for name in self.assigned
        ]  # fmt: skip
        document = {"run": "r", "state": state, "host": "x", "directory": "/r", "message": ""}
        return {**document, "summary": {"trainings": trainings}}


@pytest.fixture(autouse=True)
def hear_signals() -> Iterator[None]:
    """Restore what shells and nohup ignore for background jobs, such as these tests may be."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    module = tmp_path.name.replace("-", "_")  # modules of one process need names of their own
    (tmp_path / f"{module}.py").write_text(APP)
    (tmp_path / "campaign.yaml").write_text(CAMPAIGN.replace("sites_app", module))
    (tmp_path / "a.yaml").write_text(SITE)
    (tmp_path / "b.yaml").write_text(SITE.replace("path: /ft", "path: /ft-b"))
    (tmp_path / "sites.yaml").write_text(SITES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_module, "_PERIOD", 0.01)
    return tmp_path


def create(project: Path, sites: Mapping[str, ScriptedSite]) -> SitesRun:
    run = SitesRun.create(project / "campaign.yaml", project / "sites.yaml", project / "run")
    run.place_of = lambda _run, name: sites[name]
    return run


def ignore(*_: object) -> None:
    pass


@pytest.mark.smoke
def test_a_campaign_is_done_once_and_its_results_are_in_the_run_directory(project: Path) -> None:
    run = create(project, {"a": ScriptedSite(), "b": ScriptedSite()})
    assert run.drive(report=ignore, show=ignore) == "finished"
    trainings = {item.name: item for item in run.store.trainings()}
    assert {name: (item.state, item.result) for name, item in trainings.items()} == {
        "t1": ("finished", {"loss": 1.5}),
        "t2": ("finished", {"loss": 1.5}),
    }
    assert str(trainings["t1"].remark).startswith("at ")
    assert len(site_lines(project / "run")) == 2
    assert (project / "run" / "requests" / "a.json").stat().st_mode & 0o777 == 0o600
    again = SitesRun.reopen(project / "run")
    again.place_of = lambda _run, _name: ScriptedSite(error=AssertionError("nothing is left to ask"))
    assert again.drive(report=ignore, show=ignore) == "finished"


def test_a_display_that_fails_costs_its_lines_and_not_the_run(project: Path) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = create(project, {"a": ScriptedSite(), "b": ScriptedSite()})
    assert run.drive(report=fail, show=fail) == "finished"


def test_a_new_coordinator_goes_on_with_the_numbers_of_the_old_one(project: Path) -> None:
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False)}
    run = create(project, sites)

    def leave(coordinator: Any, elapsed: float) -> None:
        if elapsed > 60:
            pytest.fail(str(coordinator.as_json()))
        if all(site.confirmed for site in coordinator.sites.values()):
            signal.raise_signal(signal.SIGHUP)

    assert run.drive(report=ignore, show=leave) == "detached"
    before = {name: site.order for name, site in sites.items()}
    assert "stop" not in sites["a"].verbs
    assert set(before.values()) == {1}
    for site in sites.values():
        site.finishes = True
        site.verbs.clear()
    again = SitesRun.reopen(project / "run")
    again.place_of = lambda _run, name: sites[name]
    assert again.drive(report=ignore, show=ignore) == "finished"
    assert "prepare" not in sites["a"].verbs
    assert {name: site.order for name, site in sites.items()} == before


def test_ctrl_c_stops_the_sites_and_a_second_one_leaves_them(project: Path) -> None:
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False)}
    run, said, interrupted = create(project, sites), [], []

    def interrupt(coordinator: Any, elapsed: float) -> None:
        if elapsed > 60:
            pytest.fail(str((said, coordinator.as_json())))
        if all(site.confirmed for site in coordinator.sites.values()) and not interrupted:
            interrupted.append(True)
            signal.raise_signal(signal.SIGINT)

    assert run.drive(report=said.append, show=interrupt) == "interrupted"
    assert any("Ctrl-C again leaves them" in line for line in said)
    assert all("stop" in site.verbs for site in sites.values())
    assert {item.state for item in run.store.trainings()} == {"waiting"}


def test_a_site_whose_driver_had_died_has_not_saved_and_that_is_said(project: Path) -> None:
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False)}
    sites["b"].stops_as = "died"
    said: list[str] = []
    assert create(project, sites).drive(report=said.append, show=ignore, stop=True) == "stopped"
    assert not said, "nothing has been prepared yet"
    run = SitesRun.reopen(project / "run")
    run.place_of = lambda _run, name: sites[name]

    def stop(coordinator: Any, elapsed: float) -> None:
        if elapsed > 60:
            pytest.fail(str(coordinator.as_json()))
        if all(site.confirmed for site in coordinator.sites.values()):
            run.store.request_stop()

    assert run.drive(report=said.append, show=stop) == "stopped"
    assert [line.partition(";")[0] for line in said if "died" in line] == ["site b: its driver had died"]


def test_the_last_line_does_not_say_that_a_site_has_stopped_whose_driver_had_died(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False)}
    sites["b"].stops_as = "died"
    run = create(project, sites)

    def stop(_view: SitesView, coordinator: Coordinator, elapsed: float) -> None:
        if elapsed > 60:
            pytest.fail(str(coordinator.as_json()))
        if all(site.confirmed for site in coordinator.sites.values()):
            run.store.request_stop()

    monkeypatch.setattr(SitesView, "show", stop)
    with pytest.raises(typer.Exit):
        coordinate_and_report(run, verb="resume", as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "stopped; site b: its driver had died, and its jobs may be left; the other sites have stopped." in said


def test_a_campaign_for_many_sites_is_packed_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = []
    monkeypatch.setattr(preparation, "pack", lambda *arguments: packed.append(1) or archive.pack(*arguments))
    create(project, {})
    assert packed == [1]
    archives = [json.loads((project / "run" / "requests" / f"{name}.json").read_text())["archive"] for name in "ab"]
    assert archives[0] == archives[1] != ""


def test_a_site_may_have_the_name_of_a_file_of_the_coordinator(project: Path) -> None:
    """Runs of sites on this machine have a directory of their own."""
    (project / "sites.yaml").write_text(SITES.replace("name: a", "name: requests").replace("name: b", "name: parsl"))
    run = SitesRun.create(project / "campaign.yaml", project / "sites.yaml", project / "run")
    places = [run.make_place(name) for name in ("requests", "parsl")]
    assert [place._directory for place in places if isinstance(place, LocalPlace)] == [
        project / "run" / "sites" / "requests",
        project / "run" / "sites" / "parsl",
    ]


def test_a_site_that_hangs_delays_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "HUNG", 0.3)
    sites = {"a": ScriptedSite(), "b": ScriptedSite()}
    sites["b"].hangs = threading.Event()
    run = create(project, sites)
    assert run.drive(report=ignore, show=ignore) == "finished"
    assert {item.state for item in run.store.trainings()} == {"finished"}
    assert any("site b does not answer: no answer within 0 s" in line for line in site_lines(project / "run"))
    sites["b"].hangs.set()


def test_a_site_that_is_offline_at_the_start_is_tried_again_and_one_that_refuses_ends_the_run(project: Path) -> None:
    offline = {"a": ScriptedSite(), "b": ScriptedSite(error=RemoteError("the endpoint is offline"))}
    assert create(project, offline).drive(report=ignore, show=ignore) == "finished"
    assert offline["b"].verbs[0] == "prepare"
    refused = SitesRun.create(project / "campaign.yaml", project / "sites.yaml", project / "other")
    refused.place_of = lambda _run, _name: ScriptedSite(error=InvalidInput("login1 has other versions"))
    with pytest.raises(InvalidInput, match=r"sites.yaml:[45]: site [ab]: login1 has other versions"):
        refused.drive(report=ignore, show=ignore)


def test_an_error_of_any_kind_at_one_site_does_not_end_the_run(project: Path) -> None:
    sites = {"a": ScriptedSite(), "b": ScriptedSite(error=CollectionUnavailable("Globus does not answer"))}
    assert create(project, sites).drive(report=ignore, show=ignore) == "finished"


def test_while_nothing_can_be_stored_nothing_is_sent_and_the_run_goes_on_later(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, said, failures = {"a": ScriptedSite(), "b": ScriptedSite()}, [], iter(range(20))
    run = create(project, sites)
    write = CoordinatorFile.write

    def full(self: CoordinatorFile, run_dir: Path) -> None:
        if next(failures, None) is not None:
            assert not sites["a"].verbs
            raise OSError(28, "No space left on device")
        write(self, run_dir)

    monkeypatch.setattr(CoordinatorFile, "write", full)
    assert run.drive(report=said.append, show=ignore) == "finished"
    assert len(said) == 1
    assert "No space left on device; retrying" in said[0]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"coordinator": {"format": 7}, "lines": []}', '{"lines": []}'])
def test_a_damaged_state_is_refused_by_name(project: Path, content: str) -> None:
    run = create(project, {"a": ScriptedSite(), "b": ScriptedSite()})
    (project / "run" / COORDINATOR).write_text(content)
    with pytest.raises(InvalidInput, match=COORDINATOR):
        run.drive(report=ignore, show=ignore)


def test_other_verbs_name_what_a_run_at_several_sites_is(project: Path) -> None:
    create(project, {})
    runner = CliRunner()
    assert "sites" in json.loads(runner.invoke(app_of(), ["status", "run", "--json"]).stdout)
    for command, message in (
        (["clean", "run"], "is a run at several sites"),
        (["resume", "run", "--config", "a.yaml"], "continues with the files of its start, here; give only --retry"),
        (["resume", "run", "--detach"], "continues with the files of its start, here; give only --retry"),
        (["resume", "run", "--retry", "t9"], "t9"),
        (["run", "campaign.yaml", "--sites", "sites.yaml", "--config", "local"], "give only --sites"),
        (["run", "campaign.yaml", "--sites", "sites.yaml", "--detach"], "--detach is not for --sites"),
        (["run", "campaign.yaml", "--any-versions"], "are for --sites"),
        (["run", "campaign.yaml", "--sites", "none.yaml"], "cannot read the list of sites"),
    ):
        result = runner.invoke(app_of(), command)
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert "Traceback" not in result.output


def test_sites_that_share_nodes_are_planned_in_slots(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SitesQuestion] = []
    plan_sites = run_module.plan_sites

    def planned(question: SitesQuestion, settings: SitesSettings) -> SitePlan:
        asked.append(question)
        return plan_sites(question, settings)

    monkeypatch.setattr(run_module, "plan_sites", planned)
    sites = {"a": ScriptedSite(), "b": ScriptedSite()}
    for site in sites.values():
        site.slots = {"slots_per_node": 4, "units_per_node": 4}
    assert create(project, sites).drive(report=ignore, show=ignore) == "finished"
    assert {view.offers[0].nodes for view in asked[0].sites} == {4}
    assert {(one.trainer.min_nodes, one.trainer.max_nodes) for one in asked[0].trainings} == {(1, 4)}


@pytest.mark.parametrize(
    ("also", "reason"),
    [
        ({"status": {**ScriptedSite().status("running"), "run": "other-a"}}, "an answer about another run, 'other-a'"),
        ({"home": "elsewhere"}, "its home is now elsewhere with a lease of 900 s, it was h with 900 s"),
        ({"lease": 5}, "its home is now h with a lease of 5 s"),
        ({"lease": 10**400}, "unexpected answer"),
        ({"held": [[10**400, 1]]}, "unexpected answer"),
    ],
)
def test_an_answer_that_is_not_about_this_run_does_not_count(project: Path, also: dict[str, Any], reason: str) -> None:
    sites = {"a": ScriptedSite(), "b": ScriptedSite()}
    sites["a"].also = also
    run = create(project, sites)
    assert run.drive(report=ignore, show=ignore) == "finished"
    assert {item.remark for item in run.store.trainings()} == {"at b"}
    assert reason in site_lines(project / "run")[0]


def test_a_site_that_becomes_silent_is_shown_as_such_by_status(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_FIRST_RETRY", 0.2)
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False)}
    run = create(project, sites)
    shown: list[list[str]] = []

    def look(coordinator: Coordinator, _: float) -> None:
        if all(site.silent for site in coordinator.sites.values()):
            if shown:  # the state of the round before has been stored
                sites["a"].error = sites["b"].error = None
                sites["a"].finishes = sites["b"].finishes = True
            shown.append(site_lines(project / "run"))
        elif all(site.answer is not None for site in coordinator.sites.values()) and not shown:
            sites["a"].error = sites["b"].error = RemoteError("out of reach")

    assert run.drive(report=ignore, show=look) == "finished"
    assert all("does not answer: out of reach" in line for line in shown[1])


def test_a_training_that_has_failed_is_retried_and_the_failure_before_does_not_count_again(project: Path) -> None:
    """Nor does it for a coordinator that is killed after that."""
    sites = {"a": ScriptedSite(), "b": ScriptedSite()}
    for site in sites.values():
        site.ends_as = "failed"
    run = create(project, sites)
    assert run.drive(report=ignore, show=ignore) == "finished"
    assert {item.state for item in run.store.trainings()} == {"failed"}
    again = SitesRun.reopen(project / "run")
    again.place_of = lambda _run, name: sites[name]
    assert again.to_retry(["t1"]) == ("t1",)
    assert again.to_retry([], failed=True) == ("t1", "t2")
    with pytest.raises(InvalidInput, match="t9"):
        again.to_retry(["t9"])

    def leave(coordinator: Coordinator, elapsed: float) -> None:
        if elapsed > 60 or coordinator.trainings["t1"].ended is not None:
            pytest.fail(str(coordinator.as_json()))
        if coordinator.trainings["t1"].site is not None and all(site.retry for site in sites.values()):
            signal.raise_signal(signal.SIGHUP)

    assert again.drive(report=ignore, show=leave, retry=["t1"]) == "detached"
    assert {site.retry["t1"] for site in sites.values()} == {1}
    for site in sites.values():
        site.ends_as, site.also = "finished", {"retried": {"t1": 1}}
    last = SitesRun.reopen(project / "run")
    last.place_of = lambda _run, name: sites[name]
    assert last.drive(report=ignore, show=ignore) == "finished"
    assert {item.name: item.state for item in last.store.trainings()} == {"t1": "finished", "t2": "failed"}
    with pytest.raises(InvalidInput, match="t1 has finished; there is nothing to retry"):
        last.to_retry(["t1"])


def test_a_cancelled_training_is_continued_by_a_retry(project: Path) -> None:
    sites = {"a": ScriptedSite(), "b": ScriptedSite()}
    run = create(project, sites)
    result = CliRunner().invoke(app_of(), ["cancel", str(run.directory), "t1"])
    assert result.exit_code == 0
    assert "To continue it: freetrain resume" in " ".join(result.output.split())
    assert run.drive(report=ignore, show=ignore, retry=run.to_retry(["t1"])) == "finished"
    assert {item.state for item in run.store.trainings()} == {"finished"}


def test_explain_says_why_a_training_is_at_its_site_and_which_waits(project: Path) -> None:
    sites = {"a": ScriptedSite(finishes=False), "b": ScriptedSite(finishes=False, nodes=0)}
    run = create(project, sites)
    runner = CliRunner()
    before = runner.invoke(app_of(), ["explain", "run"])
    assert "t1 waiting: no decision has been made yet" in before.output

    def leave(coordinator: Coordinator, elapsed: float) -> None:
        if elapsed > 60:
            pytest.fail(str(coordinator.as_json()))
        if coordinator.sites["a"].confirmed:
            signal.raise_signal(signal.SIGHUP)

    assert run.drive(report=ignore, show=leave) == "detached"
    said = runner.invoke(app_of(), ["explain", "run"]).output
    assert "site b: 0 nodes held, 0 more available" in said
    assert "t1 waiting at a: 1 of 1.0 nodes expected at a" in said
    assert "t2 waiting at a: no nodes expected; queued at a" in said
    figures = json.loads(runner.invoke(app_of(), ["explain", "run", "--json"]).output)
    assert [(item["site"], item["moves"]) for item in figures["trainings"]] == [("a", 0), ("a", 0)]
    kept = json.loads((project / "run" / COORDINATOR).read_text())
    kept["coordinator"]["sites"]["a"]["starts"] = ["soon"]
    for text in (json.dumps(kept), '{"coordinator": {"trainings": []}, "lines": []}'):
        (project / "run" / COORDINATOR).write_text(text)
        damaged = runner.invoke(app_of(), ["explain", "run"])
        assert damaged.exit_code == 2
        assert "coordinator.json is damaged" in damaged.output
    other = runner.invoke(app_of(), ["explain", str(project)])
    assert other.exit_code == 2
    assert "Traceback" not in other.output
