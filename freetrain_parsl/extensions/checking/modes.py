"""Modes of torch: results independent of how batches are divided, and the way to a loss with what its graph shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.functional import batch_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from freetrain_parsl.extensions.checking.records import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["Constants", "Scalars", "SteadyNorm", "enter", "facts_of", "nodes_of"]

_FILLED = {
    "normal_": 0.5,
    "uniform_": 0.5,
    "exponential_": 0.5,
    "log_normal_": 0.5,
    "bernoulli_": 1,
    "random_": 0,
    "rand": 0.5,
    "randn": 0.5,
    "rand_like": 0.5,
    "randn_like": 0.5,
    "normal": 0.5,
    "bernoulli": 1,
    "randint": 1,
    "randint_like": 1,
    "multinomial": 1,
}
"""Operator -> the constant that it draws."""
_Mode = TypeVar("_Mode")
_TRAINING = 5  # place of the argument of this name
_MOST_NODES = 100_000
_SUM = 2  # torch's number of the reduction "sum"


def enter(mode: Callable[..., _Mode], *args: Any) -> _Mode:
    """Make and enter a mode, for the rest of this process; return it."""
    made = mode(*args)
    made.__enter__()  # type: ignore[attr-defined]  # torch's modes have no common base
    return made


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Makes torch's random numbers constants; those of dropout keep everything."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in _FILLED and name.endswith("_"):
            return args[0].fill_(_FILLED[name])
        result = function(*args, **(kwargs or {}))
        return result.fill_(_FILLED[name]) if name in _FILLED else result


class SteadyNorm(TorchFunctionMode):
    """Makes BatchNorm normalize with its running statistics, which are those of all samples."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is batch_norm:
            has_statistics = (args[1] if len(args) > 1 else kwargs.get("running_mean")) is not None
            if has_statistics and len(args) > _TRAINING:
                args = (*args[:_TRAINING], False, *args[_TRAINING + 1 :])
            elif has_statistics:
                kwargs = {**kwargs, "training": False}
        return function(*args, **kwargs)


class Scalars(TorchFunctionMode):
    """Records each scalar with a graph, and the user's line that computed it: what `line` returns, as ``file:line``."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line
        self._seen: list[tuple[str, str, torch.Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() == 1 and result.grad_fn is not None:
            where = self._line()
            if where:
                self._seen.append((where, getattr(function, "__name__", str(function)), result))
        return result

    def take(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return what was recorded since the last call: line, function and scalar."""
        seen, self._seen = self._seen, []
        return seen


def nodes_of(loss: torch.Tensor) -> set[Any]:
    """Return the nodes of a loss's graph."""
    nodes: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting and len(nodes) < _MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return nodes


def facts_of(nodes: Collection[Any]) -> Graph:
    """Look at the nodes of a graph; see `nodes_of`."""
    names = [node.name() for node in nodes]
    return Graph(
        sums=any(getattr(node, "_saved_reduction", None) == _SUM for node in nodes),
        weighted=any(
            name.startswith("NllLoss") and getattr(node, "_saved_weight", None) is not None
            for node, name in zip(nodes, names, strict=True)
        ),
        casts=any(name.startswith("ToCopy") for name in names),
        checkpoint=any("CheckpointFunction" in name for name in names),
    )
