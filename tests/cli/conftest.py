"""The command as its entry point runs it, in the process of the test."""

from __future__ import annotations

import shlex
import sys
from types import SimpleNamespace

import pytest

from freetrain_parsl.cli import main


@pytest.fixture
def command(monkeypatch, capsys):
    """Run ``freetrain`` with the arguments of a line; return its exit code and output."""

    def run(line):
        monkeypatch.setattr(sys, "argv", ["freetrain", *shlex.split(line)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=out.replace("\N{NO-BREAK SPACE}", " "), err=err)

    return run
