"""The steps of torch's other elementwise optimizers: one hidden optimizer for each member, on its whole rows."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from freetrain_parsl.extensions.fusion.optimizers.optimizer_watch import OptimizerWatch, versions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from freetrain_parsl.extensions.fusion.engine.array import Segment

__all__ = ["HiddenOptimizers"]

_PER_PARAMETER = ("step", "mu_product", "eta", "mu")
"""States that are one number for each parameter, the same for all parameters of a group."""


class HiddenOptimizers:
    """One optimizer of the same class for each member, whose parameters are whole rows."""

    def __init__(self, optimizers: Sequence[Optimizer], segments: Sequence[Segment]) -> None:
        self._optimizers = optimizers
        self._segments = segments
        self._rows = [[segment.rows[row] for segment in segments] for row in range(len(optimizers))]
        self._step = inspect.unwrap(type(optimizers[0]).step)  # without the hooks of all optimizers
        self._hidden: list[Optimizer] = []
        # For each member: numbers of each parameter of a row, the row's state, and the name there.
        self._shown: list[list[tuple[torch.Tensor, dict[str, Any], str]]] = [[] for _ in optimizers]
        self._versions: list[list[int]] = []  # of these, for each member: user code can change them
        self._changed: set[int] = set()  # members whose states user code has changed since they were taken
        self._hooks = [o.register_state_dict_pre_hook(lambda _optimizer: self._show()) for o in optimizers]
        self.uniform = True
        self._watch = OptimizerWatch(optimizers)
        self.take_over()

    def is_current(self) -> bool:
        """See `RowOptimizer`."""
        if self._changed or self._shown_versions() != self._versions:
            return False
        return self._watch.is_same() or self._watch.is_alike()

    def step(self) -> None:
        """See `RowOptimizer`."""
        before = self._counts_of_states()
        with torch.no_grad():
            for row, hidden in enumerate(self._hidden):
                for group, segment in zip(hidden.param_groups, self._segments, strict=True):
                    own = self._optimizers[row].param_groups[segment.place[1]]
                    group.update({name: value for name, value in own.items() if name != "params"})
                    group["params"][0].grad = None if segment.gradients is None else segment.gradients[row]
                self._step(hidden)
            for member in self._shown:
                for numbers, state, name in member:
                    numbers.copy_(state[name])
        self._versions = self._shown_versions()
        if self._counts_of_states() != before:
            self._show()

    def _counts_of_states(self) -> list[list[int]]:
        """Return, for each member and segment, how many states there are: none before its first step."""
        return [
            [len(hidden.state.get(whole, ())) for whole in rows]
            for hidden, rows in zip(self._hidden, self._rows, strict=True)
        ]

    def _shown_versions(self) -> list[list[int]]:
        return [versions_of([numbers for numbers, _, _ in member]) for member in self._shown]

    def _show(self) -> None:
        """Make the states of the members' optimizers views of the hidden ones, and of numbers that follow them."""
        self._give(shared=True)

    def hand_over(self) -> None:
        """See `RowOptimizer`."""
        self._give(shared=False)

    def _give(self, *, shared: bool) -> None:
        """Give the members' optimizers their states, but those that user code has changed since they were taken."""
        if not self.uniform:
            return  # the members' optimizers have kept their states
        now = self._shown_versions()
        for row, (optimizer, hidden) in enumerate(zip(self._optimizers, self._hidden, strict=True)):
            if not self._watch.has_states_of(row) or now[row] != self._versions[row]:
                self._changed.add(row)
            if row in self._changed:
                continue
            self._shown[row] = []
            for segment, whole in zip(self._segments, self._rows[row], strict=True):
                if whole in hidden.state:
                    self._give_segment(optimizer, segment, row, hidden.state[whole], shared=shared)
        self._versions = self._shown_versions()
        self._watch.note()

    def _give_segment(
        self, optimizer: Optimizer, segment: Segment, row: int, state: dict[str, Any], *, shared: bool
    ) -> None:
        members = segment.members[row]
        parts: dict[str, Sequence[Any]] = {}
        for name, value in state.items():
            if not isinstance(value, torch.Tensor):
                parts[name] = [value] * len(members)
            elif name in _PER_PARAMETER:
                each = value.expand(len(members)).clone()
                parts[name] = [each[place] for place in range(len(members))]
                if shared:
                    self._shown[row].append((each, state, name))
            else:
                parts[name] = [segment.part(value, row, place) for place in range(len(members))]
        for place, parameter in enumerate(members):
            own = {name: part[place] for name, part in parts.items()}
            optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **own}

    def release(self) -> None:
        """See `RowOptimizer`."""
        self.hand_over()
        self.discard()

    def discard(self) -> None:
        """See `RowOptimizer`."""
        for hook in self._hooks:
            hook.remove()

    def take_over(self) -> None:
        """See `RowOptimizer`."""
        self._hidden = []
        self._shown = [[] for _ in self._optimizers]
        self._versions = self._shown_versions()
        self._changed = set()
        self.uniform = True
        self._watch.note()
        for row, (optimizer, rows) in enumerate(zip(self._optimizers, self._rows, strict=True)):
            make: Any = type(optimizer)
            hidden: Optimizer = make([{"params": [whole]} for whole in rows], lr=optimizer.param_groups[0]["lr"])
            for whole, segment in zip(rows, self._segments, strict=True):
                states = [optimizer.state.get(parameter, {}) for parameter in segment.members[row]]
                self.uniform = self.uniform and _are_uniform(states)
                if all(states):
                    hidden.state[whole] = {
                        name: _joined(name, [state[name] for state in states], segment)
                        for name, value in states[0].items()
                        if _is_of_torch(name, value, segment.members[row][0]) and all(name in state for state in states)
                    }
            self._hidden.append(hidden)
        if any(hidden.state for hidden in self._hidden):
            self._show()  # these are copies
        self._watch.note()


def _are_uniform(states: Sequence[dict[str, Any]]) -> bool:
    """Return whether parameters have made the same steps, so that one state can stand for all."""
    if not any(states):
        return True
    if not all(states) or any(state.keys() != states[0].keys() for state in states):
        return False
    names = [name for name in states[0] if name in _PER_PARAMETER]
    return all(len({float(state[name]) for state in states}) == 1 for name in names)


def _is_of_torch(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Return whether a state is one of torch's: user code may keep others beside them."""
    return name in _PER_PARAMETER or value is None or (torch.is_tensor(value) and value.shape == parameter.shape)


def _joined(name: str, values: Sequence[Any], segment: Segment) -> Any:
    """Return the state of a whole row from those of its parameters."""
    if name in _PER_PARAMETER or not isinstance(values[0], torch.Tensor):
        return values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
    return torch.cat([segment.flat(value, number) for number, value in enumerate(values)])
