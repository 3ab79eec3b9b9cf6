"""Files of results that are too long for the database of a run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from freetrain_parsl.storage.posix import directory_name
from freetrain_parsl.storage.staging import sync_name

__all__ = ["RESULTS", "write_result"]

RESULTS: Final = "results"
"""Directory in the run directory."""


def write_result(run_dir: Path, training: str, content: str | bytes, *, is_json: bool) -> str:
    """Write the result of a training to a file of its own, atomically, private to the user.

    Parameters
    ----------
    run_dir
        The run directory.
    training
        Its name.
    content
        The result.
    is_json
        Whether it is JSON; else it is the text of an object, or bytes.

    Returns
    -------
    str
        The file's path in the run directory.

    Raises
    ------
    OSError
        It cannot be written.
    """
    directory = run_dir / RESULTS
    directory.mkdir(mode=0o700, exist_ok=True)
    data, suffix = (content, "bin") if isinstance(content, bytes) else (content.encode(), "json" if is_json else "txt")
    path = directory / f"{directory_name(training)}.{suffix}"
    descriptor, aside = tempfile.mkstemp(prefix=".", dir=directory)  # makes it private
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
        sync_name(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    return str(path.relative_to(run_dir))
