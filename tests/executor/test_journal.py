"""The journal of a run: where it cannot be made, and how often progress is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import Journal, read_progress
from freetrain_parsl.protocol.reports import Progress


def test_a_file_that_is_no_database_is_refused_by_name_and_not_kept_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(InvalidInput, match=f"cannot create the journal {path}"):
        Journal(path)
    descriptors = Path("/proc/self/fd").iterdir()
    assert path not in [descriptor.readlink() for descriptor in descriptors if descriptor.is_symlink()]


def test_progress_is_written_once_a_second_and_at_once_where_it_is_asked_for(tmp_path: Path) -> None:
    """A hundred training jobs report twice a second; what waits for the end of one reads its last report."""
    now = 0.0
    journal = Journal(tmp_path / "journal.sqlite", clock=lambda: now)

    def written(step: int, *, all_progress: bool) -> int:
        journal.keep_progress(now, "t", Progress(step=step))
        journal.commit(all_progress=all_progress)
        return int(read_progress(journal.path)["t"]["step"])

    assert written(1, all_progress=False) == 1
    now = 0.9
    assert written(2, all_progress=False) == 1
    assert written(3, all_progress=True) == 3
    now = 2.0
    assert written(4, all_progress=False) == 4
    journal.close()
