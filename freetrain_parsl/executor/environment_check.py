"""The decision whether a new slot's Python environment can run trainings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from freetrain_parsl.executor.environment import Difference, compare, describe_environment
from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Callable

    from freetrain_parsl.protocol.messages import Hello

logger = logging.getLogger(__name__)

__all__ = ["EnvironmentCheck"]


class EnvironmentCheck:
    """Compares the environments of new slots with the driver's.

    Parameters
    ----------
    write
        Writes a record to the journal.

    Attributes
    ----------
    any_fits
        Whether any slot so far could run trainings. If none could, the site's configuration is wrong.
    """

    def __init__(self, write: Callable[[record.Record], None]) -> None:
        self.any_fits = False
        self._write = write
        self._versions = describe_environment()
        self._reported: set[str] = set()

    def refusal(self, hello: Hello) -> str:
        """Return why a slot's node cannot run trainings; empty if it can."""
        node, fault = hello.node, hello.fault
        if fault:
            difference: Difference | None = Difference(f"node {node} cannot run trainings: {fault}", refused=True)
        else:
            difference = compare(node, hello.versions, self._versions)
        if difference is not None and difference.text not in self._reported:  # once, not for each slot of a node
            self._reported.add(difference.text)
            logger.warning("%s", difference.text)
            self._write(record.EnvironmentDiffers(node, difference.text, difference.refused))
        if difference is not None and difference.refused:
            return difference.text
        self.any_fits = True
        return ""
