"""Results of collective operations of user code: the same on all members, also if one fails during an operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.group.state_transfer import pass_on

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from freetrain_parsl.training.group.process_group import Group

__all__ = ["SharedResults", "check_plain", "first_value", "total"]


class SharedResults:
    """The number of operations so far, and the latest result.

    A failure may reach some members before and others after the end of an operation. Those that have the result are
    ahead, as those with another step are, and send it to the others with their state.
    """

    def __init__(self) -> None:
        self.number = 0
        self.latest: Any = None

    def add(self, result: Any) -> None:
        """Note the result of an operation."""
        self.number += 1
        self.latest = result

    def state(self) -> dict[str, Any]:
        """Return the results as plain values and tensors."""
        return {"number": self.number, "latest": self.latest}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state."""
        self.number, self.latest = int(state["number"]), state["latest"]


def total(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the members, on its own device, in new memory.

    Raises
    ------
    PeerFailed
        A member has failed.
    """
    values = tensor.detach().to("cpu", copy=True)
    return group.sum(values).to(tensor.device)


def first_value(group: Group, value: Any) -> Any:
    """Return the value of the first member.

    Raises
    ------
    PeerFailed
        A member has failed.
    """
    received = pass_on(group, [0], list(range(1, group.size)), {"value": value} if group.is_first else None)
    return value if group.is_first else received["value"]


def check_plain(value: Any) -> None:
    """Reject a value that cannot be sent: one that is not made of numbers, strings, lists, tuples and dictionaries.

    Raises
    ------
    UsageError
        It contains something else.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, (list, tuple)):
        for each in value:
            check_plain(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            check_plain(name)
            check_plain(each)
    else:
        raise UsageError(
            f"session.broadcast takes numbers, strings, None, and lists, tuples and dictionaries of these, "
            f"got {type(value).__name__}"
        )
