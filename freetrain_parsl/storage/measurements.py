"""What trainings have measured, for later ones: small JSON files beside the checkpoints, which may be lost."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from freetrain_parsl.errors import ForeignCheckpoint
from freetrain_parsl.storage.atomic_files import TEMPORARY, write_text
from freetrain_parsl.storage.ownership import check_owned

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

__all__ = ["read_measurement", "write_measurement"]

_LONGEST = 1 << 18  # characters

T = TypeVar("T")


def read_measurement(path: Path, parse: Callable[[Any], T], consequence: str) -> T | None:
    """Read a file of `write_measurement`.

    Parameters
    ----------
    path
        The file.
    parse
        Converts its content; raises ValueError, TypeError or KeyError if this is invalid.
    consequence
        What follows if the file cannot be used, for the log.

    Returns
    -------
    measurement
        ``None`` if there is no such file, or if it cannot be used, which is logged.
    """
    try:
        check_owned(path)
        return parse(json.loads(_text(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ForeignCheckpoint) as error:
        logger.warning("%s is not used, %s: %s", path, consequence, error)
        return None


def _text(path: Path) -> str:
    if not path.is_file():  # a pipe, for example, would make the driver wait
        raise OSError("it is not a regular file")
    with path.open(encoding="utf-8") as file:
        return file.read(_LONGEST)


def write_measurement(path: Path, content: object) -> None:
    """Write a file atomically; a failure is only logged, since the next run can measure it again."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        os.close(descriptor)
        aside = Path(name)
        try:
            write_text(aside, json.dumps(content))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be written, the next run measures it again: %s", path, error.strerror or error)
