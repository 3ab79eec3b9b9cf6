"""A stale writer that resumes changes nothing, wherever it was stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.errors import CheckpointError
from freetrain_parsl.storage.posix import CheckpointDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.storage.entry import Entry

CALLS = 9
"""System calls that divide a save into parts."""


def save(directory: CheckpointDirectory, step: int) -> Entry:
    entry, _ = directory.publish(step, lambda sink: sink.write(b"state %d" % step), {})
    directory.prune(entry, keep=1)
    return entry


def stop_before(monkeypatch: pytest.MonkeyPatch, moment: int, meanwhile: Callable[[], object]) -> None:
    """Call `meanwhile` before the `moment`-th call that makes a checkpoint durable or visible."""
    calls = 0

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                meanwhile()
            return call(*args, **kwargs)

        return guarded

    for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "open")):
        monkeypatch.setattr(owner, name, guard(getattr(owner, name)))


@pytest.mark.parametrize("moment", range(1, CALLS + 1))
def test_a_writer_that_was_stopped_anywhere_is_shut_out_by_the_next(tmp_path: Path, moment: int) -> None:
    """It gets an error, does not change `latest`, removes no checkpoint of the next writer, and leaves no files."""
    old, new = CheckpointDirectory(tmp_path, "net"), CheckpointDirectory(tmp_path, "net")
    old.open(1)
    save(old, 1)

    def take_over() -> None:
        new.open(2)
        save(new, 3)

    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_before(monkeypatch, moment, take_over)
        with pytest.raises(CheckpointError, match=r"another process has taken over \(generation 2, process \d+ on "):
            save(old, 2)
    assert new.entries()[0].step == 3
    assert (new.path / "latest").read_text() == "step-0000000003\n"
    assert new.entries()[0].verify()[0].read_bytes() == b"state 3"
    new.close()
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_shut_out_writer_stays_shut_out(tmp_path: Path) -> None:
    old, new = CheckpointDirectory(tmp_path, "net"), CheckpointDirectory(tmp_path, "net")
    old.open(1)
    new.open(2)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another process has taken over"):
            save(old, 5)
    old.close()
    assert save(new, 1).step == 1


def test_a_directory_that_is_not_open_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it is not open for writing"):
        save(CheckpointDirectory(tmp_path, "net"), 1)
