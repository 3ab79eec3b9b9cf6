"""Files that the user has named: whatever they are, a line says so at once, and pipes that are written to are read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.cluster.swf import SwfLog
from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.extensions.replay.holes import numbered_lines
from freetrain_parsl.extensions.simulate.jobs.workload import read_rows
from freetrain_parsl.strict_yaml import read_text

if TYPE_CHECKING:
    from collections.abc import Callable

READERS: dict[str, Callable[[Path], object]] = {
    "YAML": lambda path: read_text(path, "site file"),
    "CSV": lambda path: list(read_rows(path, ["a"])),
    "log of holes": lambda path: list(numbered_lines(path)),
    "job log": SwfLog,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("kind", ["pipe", "directory", "endless device", "missing"])
def test_what_is_no_file_is_one_line_at_once(tmp_path: Path, read: Callable[[Path], object], kind: str) -> None:
    path = tmp_path / "named"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    raised: list[BaseException] = []

    def run() -> None:
        try:
            read(path)
        except InvalidInput as error:
            raised.append(error)

    begun = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5.0)
    assert not thread.is_alive(), "it waits"
    assert time.monotonic() - begun < 5.0
    (error,) = raised
    assert str(error).isprintable()
    assert "named" in str(error)
    if kind == "pipe":
        assert "it is a pipe, and nothing writes to it; give a file" in str(error)


@pytest.mark.parametrize("pause", [0.0, 0.8], ids=["at once", "later"])
def test_a_pipe_that_a_program_writes_to_is_read(pause: float) -> None:
    """As of ``<(…)`` in a shell, whose program may take its time."""
    end, begin = os.pipe()

    def write() -> None:
        time.sleep(pause)
        os.write(begin, b"system: local\n")
        os.close(begin)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_text(Path(f"/dev/fd/{end}"), "site file") == "system: local\n"
    thread.join()
    os.close(end)
