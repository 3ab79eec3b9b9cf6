"""What a coordinator keeps in the run directory: its state, and what ``freetrain status`` shows of the sites."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.storage.atomic_files import replace_text
from freetrain_parsl.storage.owned_files import read_small_file
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["COORDINATOR", "CoordinatorFile", "site_lines"]

COORDINATOR = "coordinator.json"


@dataclass(frozen=True)
class CoordinatorFile:
    """The content of the file.

    Parameters
    ----------
    document
        As of `Coordinator.as_json`.
    lines
        The sites, one line each.
    """

    document: dict[str, Any]
    lines: Sequence[str]

    def write(self, run_dir: Path) -> None:
        """Replace the file durably."""
        document = {"coordinator": self.document, "lines": list(self.lines)}
        replace_text(run_dir / COORDINATOR, json.dumps(document, indent=1) + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Self | None:
        """Read the file; ``None`` if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        path = run_dir / COORDINATOR
        try:
            document = parse_stored(read_small_file(path))
            return cls({**document["coordinator"]}, tuple(map(str, document["lines"])))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None


def site_lines(run_dir: Path) -> list[str]:
    """Describe the sites of a run, as its coordinator has seen them last."""
    kept = CoordinatorFile.read(run_dir)
    return [] if kept is None else list(kept.lines)
