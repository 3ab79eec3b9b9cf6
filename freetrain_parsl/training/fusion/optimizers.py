"""Optimizer steps of all members of an array at once, on rows instead of single parameters.

Three ways, the first that is possible: SGD, Adam and AdamW for all rows, each with the hyperparameters of its member;
for torch's other elementwise optimizers, one hidden optimizer of the same class for each member, whose parameters are
the member's whole rows; otherwise each member's own optimizer. The members' optimizers keep their parameter groups,
which schedulers change, and their states: views of the rows' states.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import optim

from freetrain_parsl.training.fusion.optimizer_watch import OptimizerWatch, has_own_steps, is_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from freetrain_parsl.training.fusion.array import Segment

__all__ = ["RowOptimizer", "row_optimizer"]

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.Adadelta, optim.Adamax,
    optim.RAdam, optim.ASGD, optim.Rprop,
)  # fmt: skip
_PER_PARAMETER = ("step", "mu_product", "eta", "mu")
"""States that are one number for each parameter, the same for all parameters of a group."""
_UNUSUAL = ("maximize", "amsgrad", "differentiable", "capturable")
_SWITCHES = ("nesterov", "decoupled_weight_decay", "fused")
"""Options by which the formula or its states differ."""


class RowOptimizer(Protocol):
    """Makes the steps of one optimizer of all members."""

    uniform: bool
    """Whether all parameters of a member have made the same steps, so that `step` can be used."""

    def is_current(self) -> bool:
        """Return whether the members' optimizers have the states and options that this one knows."""

    def step(self) -> None:
        """Make a step of all members, on complete gradients of their rows; `is_current` has returned true."""

    def hand_over(self) -> None:
        """Give the members' optimizers their states, before they are used or saved."""

    def take_over(self) -> None:
        """Take the states of the members' optimizers."""

    def release(self) -> None:
        """Give the members' optimizers their states for good."""

    def discard(self) -> None:
        """Leave the members' optimizers as they are: user code has changed them, and another one takes their states."""


def row_optimizer(optimizers: Sequence[Optimizer], segments: Sequence[Segment]) -> RowOptimizer:
    """Return the fastest way to step these optimizers, one for each member.

    Parameters
    ----------
    optimizers
        Of the same class, with the same parameter groups.
    segments
        The segments of their trainable parameters.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    plain = (
        type(optimizers[0]) in _ELEMENTWISE
        and not any(_has_changeable(group) for group in groups)
        and not any(has_own_steps(optimizer) for optimizer in optimizers)
    )
    if not plain:
        return OwnOptimizers(optimizers)
    formula = _FORMULAS.get(type(optimizers[0]))
    usual = not any(group.get(name) for group in groups for name in _UNUSUAL)
    alike = all(len({group.get(name) for group in each}) == 1 for each in _by_place(optimizers) for name in _SWITCHES)
    real = all(segment.rows.is_floating_point() for segment in segments)
    if formula is not None and usual and alike and real:
        if isinstance(formula, _Adam) and _has_kernels(segments):
            return AdamKernels(optimizers, segments, formula)
        return FormulaOptimizer(optimizers, segments, formula)
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return OwnOptimizers(optimizers)
    return HiddenOptimizers(optimizers, segments)


class OwnOptimizers:
    """Each member's own optimizer; for those that are not elementwise, or not torch's."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    uniform = True

    def is_current(self) -> bool:
        """See `RowOptimizer`: nothing is kept elsewhere."""
        return True

    def step(self) -> None:
        """See `RowOptimizer`; needs the gradients in the parameters' ``.grad``."""
        for optimizer in self._optimizers:
            optimizer.step()

    def hand_over(self) -> None:
        """See `RowOptimizer`: they have them."""

    def take_over(self) -> None:
        """See `RowOptimizer`: they have them."""

    def release(self) -> None:
        """See `RowOptimizer`: they have them."""

    def discard(self) -> None:
        """See `RowOptimizer`."""


Hyperparameters: TypeAlias = dict[str, list[float]]
"""Name as in a parameter group, ``betas 0`` and ``betas 1`` for a pair -> the value of each member."""


class Formula(Protocol):
    """The formula of an optimizer, for all rows of a segment at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """The hyperparameters that may differ between the members."""

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the states that have the shape of the parameters."""

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        """Update rows and states in place.

        Parameters
        ----------
        rows, gradients
            Shape [members, elements].
        states
            By name, of the same shape.
        hyper
            See `Hyperparameters`.
        group
            Parameter group of the first member, for the options that are the same for all.
        steps
            Number of this step for each member, from 1.
        """


class _Sgd:
    """As ``torch.optim.SGD``."""

    names = ("lr", "momentum", "dampening", "weight_decay")

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        if any(hyper["weight_decay"]):
            gradients = gradients.addcmul(rows, _column(hyper["weight_decay"], rows))
        if "momentum_buffer" in states:
            buffer = states["momentum_buffer"]
            momentum = _column(hyper["momentum"], rows)
            # The buffer begins as the first gradient, whatever the dampening.
            taken = [
                1.0 if n == 1 or not m else 1 - d
                for n, m, d in zip(steps, hyper["momentum"], hyper["dampening"], strict=True)
            ]
            buffer.mul_(momentum).addcmul_(gradients, _column(taken, rows))
            gradients = gradients.addcmul(buffer, momentum) if group["nesterov"] else buffer
        rows.addcmul_(gradients, _column(hyper["lr"], rows), value=-1)


class _Adam:
    """As ``torch.optim.Adam`` and, with decoupled weight decay, ``AdamW``."""

    names = ("lr", "betas", "eps", "weight_decay")

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002 - see `Formula`
        return "exp_avg", "exp_avg_sq"

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        mean, square = states["exp_avg"], states["exp_avg_sq"]
        lr, first, second = hyper["lr"], hyper["betas 0"], hyper["betas 1"]
        if any(decay := hyper["weight_decay"]):
            if group.get("decoupled_weight_decay", False):
                rows.mul_(_factor([1 - rate * part for rate, part in zip(lr, decay, strict=True)], rows))
            else:
                gradients = gradients.addcmul(rows, _column(decay, rows))
        if _agree(first) and _agree(second):
            mean.lerp_(gradients, 1 - first[0])
            square.mul_(second[0]).addcmul_(gradients, gradients, value=1 - second[0])
        else:
            mean.lerp_(gradients, _column([1 - beta for beta in first], rows).expand_as(rows))
            added = gradients * _column([1 - beta for beta in second], rows)
            square.mul_(_column(second, rows)).addcmul_(gradients, added)
        # The step is lr / (1 - first^n) * mean / (sqrt(square) / sqrt(1 - second^n) + eps).
        divisor = square.sqrt().div_(_factor([math.sqrt(1 - b**n) for b, n in zip(second, steps, strict=True)], rows))
        divisor.add_(_factor(hyper["eps"], rows))
        if all(lr):
            divisor.mul_(_factor([(1 - b**n) / rate for rate, b, n in zip(lr, first, steps, strict=True)], rows))
            rows.addcdiv_(mean, divisor, value=-1)
        else:
            sizes = [rate / (1 - b**n) for rate, b, n in zip(lr, first, steps, strict=True)]
            rows.addcmul_(mean.div(divisor), _column(sizes, rows), value=-1)


class _AdamW(_Adam):
    """As ``torch.optim.AdamW``, which older versions of torch do not derive from ``Adam``."""

    def update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: dict[str, torch.Tensor],
        hyper: Hyperparameters,
        group: dict[str, Any],
        steps: list[float],
    ) -> None:
        super().update(rows, gradients, states, hyper, {**group, "decoupled_weight_decay": True}, steps)


_FORMULAS: dict[type, Formula] = {optim.SGD: _Sgd(), optim.Adam: _Adam(), optim.AdamW: _AdamW()}


def _hyperparameters(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> Hyperparameters:
    found: Hyperparameters = {}
    for name in names:
        values = [group[name] for group in groups]
        if isinstance(values[0], (tuple, list)):
            for place, part in enumerate(zip(*values, strict=True)):
                found[f"{name} {place}"] = [float(value) for value in part]
        else:
            found[name] = values
    return found


class FormulaOptimizer:
    """SGD, Adam or AdamW, by its formula for all rows."""

    def __init__(self, optimizers: Sequence[Optimizer], segments: Sequence[Segment], formula: Formula) -> None:
        self._optimizers = optimizers
        self._segments = segments
        self._formula = formula
        self._states: list[dict[str, torch.Tensor]] = [{} for _ in segments]
        self._counters: list[torch.Tensor] = []  # for each segment: steps of each member and parameter
        self._versions: list[int] = []  # of the counters, which user code can change as `state["step"]`
        self._steps = [0.0] * len(optimizers)
        self._hyper: list[Hyperparameters] = []  # of each segment; empty: to be read
        self.uniform = True
        self._watch = OptimizerWatch(optimizers)
        self.take_over()

    def is_current(self) -> bool:
        """See `RowOptimizer`."""
        if _versions(self._counters) != self._versions:
            return False
        if self._watch.is_same():
            return True
        self._hyper = []
        return self._watch.is_alike()

    def step(self) -> None:
        """See `RowOptimizer`."""
        self._hyper = self._hyper or [
            _hyperparameters(_groups(self._optimizers, segment), self._formula.names) for segment in self._segments
        ]
        new = not all(self._steps)
        self._steps = [number + 1 for number in self._steps]
        with torch.no_grad():
            for number, segment in enumerate(self._segments):
                group = self._optimizers[0].param_groups[segment.place[1]]
                if segment.gradients is None:
                    continue
                self._counters[number] += 1
                self._update(number, segment.rows, segment.gradients, self._hyper[number], group)
        self._versions = _versions(self._counters)
        if new:
            self._share()

    def _update(
        self, number: int, rows: torch.Tensor, gradients: torch.Tensor, hyper: Hyperparameters, group: dict[str, Any]
    ) -> None:
        """Update the rows and states of a segment."""
        self._formula.update(rows, gradients, self._states[number], hyper, group, self._steps)

    def hand_over(self) -> None:
        """See `RowOptimizer`: their states are views."""

    def release(self) -> None:
        """See `RowOptimizer`: their states are views."""

    def discard(self) -> None:
        """See `RowOptimizer`."""

    def take_over(self) -> None:
        """See `RowOptimizer`."""
        self._counters = []
        for number, segment in enumerate(self._segments):
            groups = _groups(self._optimizers, segment)
            names = dict.fromkeys(name for group in groups for name in self._formula.states(group))
            states = {name: torch.zeros_like(segment.rows) for name in names}
            # Where torch keeps them, for steps that the members' optimizers make themselves.
            device = segment.rows.device if groups[0].get("fused") else None
            counters = torch.zeros(len(self._optimizers), len(segment.members[0]), device=device)
            for row, (optimizer, member) in enumerate(zip(self._optimizers, segment.members, strict=True)):
                for place, parameter in enumerate(member):
                    state = optimizer.state.get(parameter, {})
                    for name in names:
                        if isinstance(state.get(name), torch.Tensor):
                            segment.of(states[name], row, place).copy_(state[name])
                    counters[row, place] = float(state["step"]) if "step" in state else float(_begun(state))
            self._states[number] = states
            self._counters.append(counters)
        self.uniform = True
        if self._segments:
            self._steps = self._counters[0][:, 0].tolist()
            self.uniform = all(bool((each == each.new_tensor(self._steps)[:, None]).all()) for each in self._counters)
        if any(self._steps):
            self._share()
        self._hyper = []
        self._versions = _versions(self._counters)
        self._watch.note()

    def _share(self) -> None:
        """Make the states of the members' optimizers views of the rows' states."""
        for segment, states, counters in zip(self._segments, self._states, self._counters, strict=True):
            for row, (optimizer, member) in enumerate(zip(self._optimizers, segment.members, strict=True)):
                if not counters[row].any():
                    continue
                names = self._formula.states(optimizer.param_groups[segment.place[1]])
                for place, parameter in enumerate(member):
                    own = {name: segment.of(states[name], row, place) for name in names}
                    counted = {} if isinstance(optimizer, optim.SGD) else {"step": counters[row, place]}
                    if counted or own:
                        optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **counted, **own}
        self._watch.note()


def _has_kernels(segments: Sequence[Segment]) -> bool:
    """Return whether torch's fused kernels of Adam are there, and faster than single operators: not on GPUs."""
    there = hasattr(torch, "_fused_adam_") and hasattr(torch, "_fused_adamw_")
    kinds = {(segment.rows.device.type, segment.rows.dtype) for segment in segments}
    return there and kinds <= {("cpu", torch.float32), ("cpu", torch.float64)}


class _KernelCall(NamedTuple):
    """Arguments of torch's kernel for some members: all but the gradients."""

    members: list[int]
    rows: list[torch.Tensor]
    means: list[torch.Tensor]
    squares: list[torch.Tensor]
    steps: list[torch.Tensor]
    options: dict[str, Any]


class AdamKernels(FormulaOptimizer):
    """Adam or AdamW by torch's kernel for CPUs: one pass through the memory, for members with equal hyperparameters."""

    def take_over(self) -> None:
        """See `RowOptimizer`."""
        super().take_over()
        self._parts = [  # of each segment: rows, means, squares and step counts of each member
            [each.unbind() for each in (segment.rows, states["exp_avg"], states["exp_avg_sq"], counters[:, 0])]
            for segment, states, counters in zip(self._segments, self._states, self._counters, strict=True)
        ]
        self._calls: dict[int, tuple[Hyperparameters, list[_KernelCall]]] = {}  # of each segment

    def _update(
        self, number: int, rows: torch.Tensor, gradients: torch.Tensor, hyper: Hyperparameters, group: dict[str, Any]
    ) -> None:
        decoupled = isinstance(self._optimizers[0], optim.AdamW) or group.get("decoupled_weight_decay", False)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        known, calls = self._calls.get(number, (None, []))
        if known is not hyper:
            calls = self._kernel_calls(number, hyper)
            self._calls[number] = hyper, calls
        if len(calls) == 1:
            means, squares = self._states[number]["exp_avg"], self._states[number]["exp_avg_sq"]
            kernel([rows], [gradients], [means], [squares], [], calls[0].steps[:1], **calls[0].options)
            return
        own = gradients.unbind()
        for call in calls:
            given = [own[member] for member in call.members]
            kernel(call.rows, given, call.means, call.squares, [], call.steps, **call.options)

    def _kernel_calls(self, number: int, hyper: Hyperparameters) -> list[_KernelCall]:
        """Return one call of the kernel for the members of a segment with equal hyperparameters and steps."""
        equal: dict[tuple[float, ...], list[int]] = {}
        for member, values in enumerate(zip(*hyper.values(), self._steps, strict=True)):
            equal.setdefault(values, []).append(member)
        calls = []
        for members in equal.values():
            given = {name: values[members[0]] for name, values in hyper.items()}
            options = {
                "lr": given["lr"],
                "beta1": given["betas 0"],
                "beta2": given["betas 1"],
                "weight_decay": given["weight_decay"],
                "eps": given["eps"],
                "amsgrad": False,
                "maximize": False,
            }
            rows, means, squares, steps = ([part[i] for i in members] for part in self._parts[number])
            calls.append(_KernelCall(members, rows, means, squares, steps, options))
        return calls


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
        new = not all(hidden.state for hidden in self._hidden)
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
        if new:
            self._show()

    def _shown_versions(self) -> list[list[int]]:
        return [_versions([numbers for numbers, _, _ in member]) for member in self._shown]

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
                parts[name] = [value[c].view(p.shape) for c, p in zip(segment.columns, members, strict=True)]
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
                        name: _joined(name, [state[name] for state in states])
                        for name, value in states[0].items()
                        if _is_of_torch(name, value, segment.members[row][0])
                    }
            self._hidden.append(hidden)
        if all(hidden.state for hidden in self._hidden):
            self._show()  # these are copies
        self._watch.note()


def _by_place(optimizers: Sequence[Optimizer]) -> list[tuple[dict[str, Any], ...]]:
    """Return, for each place of a parameter group, those of all members."""
    return list(zip(*(optimizer.param_groups for optimizer in optimizers), strict=True))


def _groups(optimizers: Sequence[Optimizer], segment: Segment) -> list[dict[str, Any]]:
    return [optimizer.param_groups[segment.place[1]] for optimizer in optimizers]


def _begun(state: dict[str, Any]) -> bool:
    """Return whether SGD, which counts no steps, has made one."""
    return state.get("momentum_buffer") is not None


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


def _joined(name: str, values: Sequence[Any]) -> Any:
    """Return the state of a whole row from those of its parameters."""
    if name in _PER_PARAMETER or not isinstance(values[0], torch.Tensor):
        return values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
    return torch.cat([value.reshape(-1) for value in values])


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _agree(values: Sequence[float]) -> bool:
    return values.count(values[0]) == len(values)


def _column(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor:
    """Return the members' values as a column, shape [members, 1]."""
    return torch.tensor(values, dtype=rows.dtype, device=rows.device)[:, None]


def _factor(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor | float:
    """Return the members' values as one number if they agree, which is faster, or as a column."""
    return values[0] if _agree(values) else _column(values, rows)


def _has_changeable(group: dict[str, Any]) -> bool:
    """Return whether an option is a tensor or the like; lists of numbers are read in each step."""
    options = [tuple(value) if isinstance(value, list) else value for name, value in group.items() if name != "params"]
    return not all(map(is_constant, options))
