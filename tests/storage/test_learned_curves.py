"""Measured scaling curves, beside the checkpoints."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.storage.measurements import read_rates, write_rates

if TYPE_CHECKING:
    from collections.abc import Callable


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    assert read_rates(tmp_path, "key") == {}
    write_rates(tmp_path, "key", {"": {1: 10.0}})
    write_rates(tmp_path, "key", {"gpu": {1: 100.0, 4: 350.0}, "cpu": {8: 20.0}})
    assert read_rates(tmp_path, "key") == {"gpu": {1: 100.0, 4: 350.0}, "cpu": {8: 20.0}}
    assert read_rates(tmp_path, "another") == {}
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "not json",
        json.dumps({"": []}),
        json.dumps({"": {}}),
        json.dumps({"": {"0": 1.0}}),
        json.dumps({"": {"-1": 1.0}}),
        json.dumps({"": {"1.5": 1.0}}),
        json.dumps({"": {"²": 1.0}}),
        json.dumps({"": {"99999999": 1.0}}),
        json.dumps({"": {"1": 0.0}}),
        json.dumps({"": {"1": True}}),
        json.dumps({"": {"1": 1e308}}),
        json.dumps({"": {"1": 5e-324}}),
        json.dumps({"": {"1": "9"}}),
        json.dumps({"": {"1": float("inf")}}),
        "[" * 4000,
    ],
    ids=range(17),
)
def test_a_damaged_file_is_not_used_and_named(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    write_rates(tmp_path, "key", {"": {1: 10.0}})
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert read_rates(tmp_path, "key") == {}
    assert f"{file} is not used" in caplog.text


def test_a_file_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rates(tmp_path, "key", {"": {1: 10.0}})
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    assert read_rates(tmp_path, "key") == {}
    assert f"{file} is not used" in caplog.text


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_used(tmp_path: Path, make: Callable[[Path], None]) -> None:
    write_rates(tmp_path, "key", {"": {1: 10.0}})
    (file,) = tmp_path.iterdir()
    file.unlink()
    make(file)
    assert read_rates(tmp_path, "key") == {}


def test_a_directory_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_rates(tmp_path / "missing", "key", {"": {1: 10.0}})
    assert "cannot be written" in caplog.text
