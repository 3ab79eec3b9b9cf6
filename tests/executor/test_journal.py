"""The journal of a run, where it cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.executor.journal import Journal


def test_a_file_that_is_no_database_is_refused_by_name_and_not_kept_open(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(InvalidInput, match=f"cannot create the journal {path}"):
        Journal(path)
    descriptors = Path("/proc/self/fd").iterdir()
    assert path not in [descriptor.readlink() for descriptor in descriptors if descriptor.is_symlink()]
