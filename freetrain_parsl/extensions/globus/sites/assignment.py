"""Which trainings of a run are assigned to its site, where a coordinator of several sites decides that.

The coordinator's calls write the file ``assignment.json``; the driver reads it several times a minute. Assignments are
numbered: one that was delayed on its way does not replace a later one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from freetrain_parsl.errors import InvalidInput
from freetrain_parsl.storage.atomic_files import replace_text
from freetrain_parsl.storage.owned_files import read_small_file
from freetrain_parsl.storage.stored_json import parse_stored

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

__all__ = ["ASSIGNMENT", "Assignment"]

ASSIGNMENT = "assignment.json"


@dataclass(frozen=True)
class Assignment:
    """The trainings of a site.

    Parameters
    ----------
    order
        Number of the coordinator's order; later ones are larger.
    trainings
        Their names.
    """

    order: int = 0
    trainings: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; the assignment is empty if there is none.

        Raises
        ------
        InvalidInput
            It is damaged.
        """
        try:
            document = parse_stored(read_small_file(path))
            return cls(int(document["order"]), tuple(map(str, document["trainings"])))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from None

    def write(self, path: Path) -> None:
        """Replace the file durably."""
        replace_text(path, json.dumps({"order": self.order, "trainings": list(self.trainings)}) + "\n")
