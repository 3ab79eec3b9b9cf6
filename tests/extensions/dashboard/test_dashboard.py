"""`freetrain dashboard`: what is refused, before anything is served."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from freetrain_parsl.cli.commands import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["."], "is not a run directory"),
        ([], "give the run directory"),
        ([".", "--no-token"], "--no-token needs --socket"),
        ([".", "--prefix", "user/me"], "--prefix must begin with a slash"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["dashboard", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("freetrain dashboard: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
