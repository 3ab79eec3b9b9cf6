"""The exception with which a slot's HTEX task ends in the driver."""

from __future__ import annotations

__all__ = ["SlotNotStarted"]


class SlotNotStarted(Exception):
    """A slot could not start, or failed outside the user's function.

    Parameters
    ----------
    hostname
        The node's name, under the name that HTEX gives it in its own errors.
    reason
        What happened there.
    """

    def __init__(self, hostname: str, reason: str) -> None:
        super().__init__(hostname, reason)  # it is pickled on its way to the driver
        self.hostname, self.reason = hostname, reason

    def __str__(self) -> str:
        return self.reason
