"""Runs of a kind that another package brings are told from campaigns by a fact of their store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from freetrain_parsl.campaign.directories import RUN_KINDS, RunKind, kind_of
from freetrain_parsl.campaign.run import CampaignRun, read_site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.cli.verbs import app_of
from freetrain_parsl.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from freetrain_parsl.campaign.stored_run import StoredRun

FACTS = {"name": "demo", "run_id": "1", "created": 0.0, "site_file": "s", "campaign_file": "c"}


class TourKind(RunKind):
    """Runs that tour."""

    name: ClassVar[str] = "tour"
    described: ClassVar[str] = "a touring run"

    def create(self, campaign: Path, file: Path, run_dir: Path | None, **_: Any) -> None:
        raise NotImplementedError

    def resume(self, run_dir: Path, *, retry: Any, retry_failed: bool, as_json: bool) -> None:
        print(f"resumed, {retry} {retry_failed} {as_json}")
        raise typer.Exit(3)

    def stop(self, run_dir: Path) -> None:
        print(f"stopped {run_dir.name}")
        raise typer.Exit(4)

    def lines(self, store: StoredRun) -> list[str]:
        return ["on tour"]

    def explain(self, store: StoredRun) -> dict[str, Any]:
        return {"trainings": [{"name": item.name, "where": "on the road"} for item in store.trainings()]}

    def sentences(self, figures: dict[str, Any]) -> list[str]:
        return [f"{item['name']} is {item['where']}" for item in figures["trainings"]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunStore:
    monkeypatch.setitem(RUN_KINDS, "tour", TourKind)
    (tmp_path / "run").mkdir(mode=0o700)
    return RunStore.create(tmp_path / "run", {**FACTS, "tour": {}}, ["net", "other"])


def said(*words: str, code: int = 0) -> str:
    """Return the output of a command."""
    done = CliRunner().invoke(app_of(words[0]), words)
    assert done.exit_code == code, done.output
    return done.output


def test_a_campaign_is_of_no_kind(store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir(mode=0o700)
    assert kind_of(RunStore.create(tmp_path / "plain", FACTS, ["net"])) is None
    assert isinstance(kind_of(store), TourKind)


def test_it_is_not_opened_as_a_campaign(store: RunStore) -> None:
    with pytest.raises(InvalidInput, match="run is a touring run; 'freetrain resume' continues it"):
        CampaignRun.reopen(store.directory)
    with pytest.raises(InvalidInput, match="run is a touring run; its jobs and checkpoints are there"):
        read_site(store)


def test_commands_ask_its_kind(store: RunStore) -> None:
    run = str(store.directory)
    assert "on tour\n" in said("status", run)
    assert json.loads(said("status", run, "--json"))["tour"] == ["on tour"]
    assert said("explain", run, "net") == "net is on the road\n"
    assert said("resume", run, "--retry", "net", code=3) == "resumed, ['net'] False False\n"
    assert "run is a touring run: it continues with the files of its start" in said("resume", run, "--detach", code=2)
    assert said("stop", run, code=4) == "stopped run\n"
