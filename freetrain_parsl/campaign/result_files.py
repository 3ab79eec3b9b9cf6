"""Files of results that are too long for the database of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from freetrain_parsl.storage.atomic_files import replace_file
from freetrain_parsl.storage.owned_files import make_private
from freetrain_parsl.storage.posix import directory_name

if TYPE_CHECKING:
    from pathlib import Path

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
    data, suffix = (content, "bin") if isinstance(content, bytes) else (content.encode(), "json" if is_json else "txt")
    path = run_dir / RESULTS / f"{directory_name(training)}.{suffix}"
    make_private(path.parent)
    replace_file(path, data)
    return str(path.relative_to(run_dir))
