"""The site file of the current directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freetrain_parsl.campaign.files.yaml_file import Variables
from freetrain_parsl.campaign.site.site import SITE_FILE, find_own_site
from freetrain_parsl.errors import InvalidInput

TEXT = "site: mine\nsystem: slurm\nblock: {partition: spare, account: '${ACCOUNT:-}'}\n"


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_callers_file_is_used_and_named() -> None:
    SITE_FILE.write_text(TEXT)
    own = find_own_site(Variables(environment={}))
    assert own.site is not None
    assert (own.site.name, own.site.block, own.site.text) == ("mine", {"partition": "spare"}, TEXT)
    assert own.remark == "using site.yaml; --config chooses another site"


def test_values_on_the_command_line_reach_it() -> None:
    SITE_FILE.write_text(TEXT)
    own = find_own_site(Variables({"account": "abc"}, environment={}))
    assert own.site is not None
    assert own.site.block["account"] == "abc"


def test_without_a_file_there_is_nothing_to_say(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SITE_FILE.write_text(TEXT)
    (here / "below").mkdir()
    monkeypatch.chdir(here / "below")  # parent directories are not searched
    assert (find_own_site(Variables()).site, find_own_site(Variables()).remark) == (None, "")


def test_a_mistake_in_it_is_refused_as_in_any_site_file() -> None:
    SITE_FILE.write_text("system: slrum\n")
    with pytest.raises(InvalidInput, match=r"site\.yaml:1: system: must be local or slurm or pbs"):
        find_own_site(Variables())


def _link() -> None:
    Path("elsewhere.yaml").write_text(TEXT)
    SITE_FILE.symlink_to("elsewhere.yaml")


def _writable() -> None:
    SITE_FILE.write_text(TEXT)
    SITE_FILE.chmod(0o666)


def _others() -> None:
    SITE_FILE.write_text(TEXT)
    os.chown(SITE_FILE, 1000, 1000)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_link, "it is a symbolic link"),
        (lambda: os.mkfifo(SITE_FILE), "it is not a regular file"),
        (SITE_FILE.mkdir, "it is not a regular file"),
        (_writable, "any user can write it"),
        pytest.param(
            _others,
            "it belongs to another user (uid 1000)",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away"),
        ),
    ],
)
def test_what_may_be_somebody_elses_is_not_used_and_not_waited_for(make, why) -> None:
    make()
    own = find_own_site(Variables())
    assert own.site is None
    assert own.remark == f"site.yaml is not used, {why}; to use it nevertheless, name it with --config"
