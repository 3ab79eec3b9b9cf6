"""Measured sizes of arrays, beside the checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.fusion.slot.array_sizes import MeasuredSize, read_array_size, write_array_size

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    assert read_array_size(tmp_path, "key") is None
    write_array_size(tmp_path, "key", MeasuredSize(8, 2.5))
    write_array_size(tmp_path, "key", MeasuredSize(4, 3.5))
    assert read_array_size(tmp_path, "key") == MeasuredSize(4, 3.5)
    write_array_size(tmp_path, "key", MeasuredSize(8, 0.9, "no gain"))
    assert read_array_size(tmp_path, "key") == MeasuredSize(8, 0.9, "no gain")
    assert read_array_size(tmp_path, "another") is None
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "not json",
        json.dumps({"size": 1, "gain": 2.0}),
        json.dumps({"size": True, "gain": 2.0}),
        json.dumps({"size": 1e9, "gain": 2.0}),
        json.dumps({"size": 4, "gain": 0.0}),
        json.dumps({"size": 4, "gain": float("nan")}),
        json.dumps({"size": 4, "gain": "2"}),
        json.dumps({"size": 4, "gain": 2.0, "turns": 1}),
        "[" * 4000,
    ],
    ids=range(12),
)
def test_a_damaged_file_is_not_used_and_named(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    write_array_size(tmp_path, "key", MeasuredSize(8, 2.5))
    (file,) = tmp_path.iterdir()
    file.write_text(content)
    assert read_array_size(tmp_path, "key") is None
    assert str(file) in caplog.text


def test_a_file_of_others_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_array_size(tmp_path, "key", MeasuredSize(8, 2.5))
    (file,) = tmp_path.iterdir()
    file.chmod(0o666)
    assert read_array_size(tmp_path, "key") is None
    assert f"{file} is not used" in caplog.text


def test_a_directory_that_cannot_be_written_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_array_size(tmp_path / "missing", "key", MeasuredSize(8, 2.5))
    assert "cannot be written" in caplog.text
