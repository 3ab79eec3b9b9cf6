"""A home of another package is used like our own."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from freetrain_parsl.campaign.files.campaign import Campaign
from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.run import CampaignRun, preflight
from freetrain_parsl.campaign.site.home import HOME_KINDS, HomeKind, open_home
from freetrain_parsl.campaign.site.site import Site
from freetrain_parsl.campaign.store import RunStore
from freetrain_parsl.errors import CollectionUnavailable, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from freetrain_parsl.campaign.files.yaml_file import Section


@dataclass(frozen=True)
class BucketHome(HomeKind):
    """A home in a bucket that says what it is told."""

    bucket: str
    told: list[str] = field(default_factory=list, compare=False)

    secrets: ClassVar = ("BUCKET_TOKEN",)

    @classmethod
    def read(cls, keys: Section, directory: Path | None) -> BucketHome:
        return cls(keys.required("bucket", "s3://mine"))

    @classmethod
    def lines(cls, run_dir: Path) -> list[str]:
        return [f"copying from {run_dir.name}"]

    def check(self) -> None:
        raise CollectionUnavailable("the bucket does not answer")

    @contextmanager
    def open(self, run: RunStore, allowed: Any) -> Iterator[Any]:
        self.told.append(f"opened with {os.environ['BUCKET_TOKEN']}")
        yield self
        self.told.append(f"closed, {'allowed' if allowed() else 'replaced'}")

    def clean(self, run: RunStore, report: Any) -> None:
        raise NotImplementedError

    def prune(self, run: RunStore, keep: int, training: str | None, report: Any, *, dry_run: bool) -> None:
        raise NotImplementedError


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HOME_KINDS, "bucket", BucketHome)


def site_with(keys: str) -> Site:
    return Site.parse(f"system: local\ncheckpoints:\n  bucket: {{{keys}}}\n", "s.yaml", Variables({}, {}))


@pytest.mark.usefixtures("bucket")
def test_its_section_is_read_and_other_keys_are_refused() -> None:
    assert site_with("bucket: s3://mine").home == BucketHome("s3://mine")
    with pytest.raises(InvalidInput, match=r"s.yaml:3: unknown key 'checkpoints.bucket.region'"):
        site_with("bucket: s3://mine, region: x")


def test_a_kind_that_is_not_installed_is_an_unknown_key() -> None:
    with pytest.raises(InvalidInput, match=r"s.yaml:3: unknown key 'checkpoints.bucket'"):
        site_with("bucket: s3://mine")


@pytest.mark.usefixtures("bucket")
def test_it_is_checked_before_a_run_and_waited_for_when_a_run_is_resumed(tmp_path: Path) -> None:
    site = site_with("bucket: s3://mine")
    with pytest.raises(InvalidInput, match="the bucket does not answer; try again later"):
        preflight(site, tmp_path)
    preflight(site, tmp_path, resuming=True)


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("with_home", [True, False])
def test_its_secrets_are_not_passed_on_to_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_home: bool
) -> None:
    monkeypatch.setenv("BUCKET_TOKEN", "secret")
    home = BucketHome("s3://mine") if with_home else None
    with open_home(home, RunStore.create(tmp_path, {"run_id": "a1"}, ["net"]), lambda: False) as opened:
        assert opened is home
        assert "BUCKET_TOKEN" not in os.environ
    if home is not None:
        assert home.told == ["opened with secret", "closed, replaced"]


@pytest.mark.usefixtures("bucket")
def test_trainings_are_assigned_to_sites_with_any_home(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import freetrain_parsl\n\n@freetrain_parsl.training_app()\ndef net(session): ...\n")
    text = "name: x\ntrainings:\n  - {app: a.py:net}\n"
    campaign = Campaign.parse(text, str(tmp_path / "c.yaml"), tmp_path, Variables({}, {}))
    site = Site.parse("system: local\n", "s.yaml", Variables({}, {}))
    with pytest.raises(InvalidInput, match=r"sites that have checkpoints.globus or checkpoints.bucket only"):
        CampaignRun.create(campaign, site, tmp_path / "run", assignment=tmp_path / "assignment.json")
