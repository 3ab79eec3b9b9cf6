"""``freetrain globus``: the login, against the stand-in of Globus Auth."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from freetrain_parsl.errors import UsageError
from freetrain_parsl.extensions.globus.storage.command import globus
from freetrain_parsl.extensions.globus.storage.login import CLIENT_ID, CLIENT_SECRET
from tests.support.globus.loopback_service import Reply
from tests.support.globus.transfer_service import LoopbackCollections, TransferService

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.globus

A, HOME = (f"{digit * 8}-0000-4000-8000-000000000000" for digit in "ac")
SITE = f"""\
system: local
checkpoints:
  directory: DIRECTORY
  globus: {{collection: {A}, path: /ft, home: {{collection: {HOME}, path: /ft}}}}
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransferService]:
    pytest.importorskip("globus_sdk")
    for name in ("a/ft", "home/ft"):
        (tmp_path / name).mkdir(parents=True)
    with TransferService(LoopbackCollections({A: tmp_path / "a", HOME: tmp_path / "home"})) as service:
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_TRANSFER", service.url)
        monkeypatch.setenv("GLOBUS_SDK_SERVICE_URL_AUTH", f"{service.url}/")
        monkeypatch.setenv(CLIENT_ID, "dddddddd-0000-4000-8000-000000000000")
        monkeypatch.setenv("HOME", str(tmp_path))
        yield service


@pytest.mark.smoke
def test_a_user_logs_in_by_a_url_and_the_tokens_are_private(service: TransferService, tmp_path: Path) -> None:
    refused = CliRunner().invoke(globus, ["whoami"])
    assert refused.exit_code == 2
    assert "run: freetrain globus login" in refused.output
    done = CliRunner().invoke(globus, ["login"], input="the-code\n")
    assert done.exit_code == 0, done.output
    assert "/v2/oauth2/authorize?" in done.output
    assert "logged in as user@loopback.test" in done.output
    (file,) = (tmp_path / ".globus").rglob("*.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert CliRunner().invoke(globus, ["whoami"]).output == "user@loopback.test\n"
    assert CliRunner().invoke(globus, ["logout"]).output == "logged out\n"
    assert CliRunner().invoke(globus, ["whoami"]).exit_code == 2


def test_a_missing_consent_prints_its_url(service: TransferService, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(SITE.replace("DIRECTORY", str(tmp_path / "a" / "ft")))
    service.collections.consent.add(HOME)
    done = CliRunner().invoke(globus, ["login", "--config", str(tmp_path / "site.yaml")], input="one\ntwo\n")
    assert done.exit_code == 0, done.output
    assert f"collection {HOME} needs a consent of its own" in done.output
    assert f"{HOME}%2Fdata_access" in done.output


def test_a_service_account_needs_no_url_and_its_secret_is_not_inherited(
    service: TransferService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLIENT_SECRET, "secret")
    assert CliRunner().invoke(globus, ["whoami"]).output == "user@loopback.test\n"


def test_one_login_is_for_copies_and_for_calls(service: TransferService, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("globus_compute_sdk")
    from freetrain_parsl.extensions.globus.remote.compute import make_client

    for name in ("GLOBUS_COMPUTE_CLIENT_ID", "GLOBUS_COMPUTE_CLIENT_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="not logged in to Globus Compute; run: freetrain globus login"):
        make_client()
    assert CliRunner().invoke(globus, ["login"], input="the-code\n").exit_code == 0
    make_client()
    assert CliRunner().invoke(globus, ["logout"]).output == "logged out\n"
    with pytest.raises(UsageError, match="not logged in"):
        make_client()


@pytest.mark.parametrize("content", ["", "[]", '{"data": 5}', "{"])
def test_damaged_tokens_are_named(service: TransferService, tmp_path: Path, content: str) -> None:
    assert CliRunner().invoke(globus, ["login"], input="the-code\n").exit_code == 0
    (file,) = (tmp_path / ".globus").rglob("*.json")
    file.write_text(content)
    for verb in ("whoami", "login", "logout"):
        done = CliRunner().invoke(globus, [verb])
        assert done.exit_code == 2
        assert "the tokens in ~/.globus/app/dddddddd-0000-4000-8000-000000000000 cannot be read" in done.output


@pytest.mark.parametrize("page", [b"<html>\n</html>", {}], ids=repr)
def test_a_login_page_of_a_proxy_is_one_line(service: TransferService, page: object) -> None:
    service.mishap("POST", "/v2/oauth2/token", Reply(page), times=9)
    done = CliRunner().invoke(globus, ["login"], input="the-code\n")
    assert done.exit_code == 2
    assert done.output.endswith("Globus Auth sent an unexpected answer; is there a proxy or a login page?\n")


def test_a_client_id_is_no_path(service: TransferService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLIENT_ID, "x/../../../y")
    done = CliRunner().invoke(globus, ["login"], input="the-code\n")
    assert done.exit_code == 2
    assert "is not the UUID of a client" in done.output
    assert not list(tmp_path.rglob("*.json"))
