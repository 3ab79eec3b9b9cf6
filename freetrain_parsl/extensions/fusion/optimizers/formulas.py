"""Steps of SGD, Adam and AdamW for all members at once, each with its values: by formulas, or by torch's kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import optim

from freetrain_parsl.extensions.fusion.optimizers.optimizer_watch import OptimizerWatch, versions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from freetrain_parsl.extensions.fusion.engine.array import Segment

__all__ = [
    "FORMULAS",
    "AdamFormula",
    "AdamKernels",
    "Formula",
    "FormulaOptimizer",
    "Hyperparameters",
    "has_kernels",
    "read_hyperparameters",
]

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


class AdamFormula:
    """As ``torch.optim.Adam`` and, with decoupled weight decay, ``AdamW``."""

    names = ("lr", "betas", "eps", "weight_decay")

    def states(self, group: dict[str, Any]) -> tuple[str, ...]:  # noqa: ARG002 - see `Formula`
        """See `Formula`."""
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
        """See `Formula`."""
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


class _AdamW(AdamFormula):
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


FORMULAS: dict[type, Formula] = {optim.SGD: _Sgd(), optim.Adam: AdamFormula(), optim.AdamW: _AdamW()}
"""Class of optimizers -> its formula."""


def read_hyperparameters(groups: Sequence[dict[str, Any]], names: Sequence[str]) -> Hyperparameters:
    """Return the hyperparameters of these names in the members' parameter groups."""
    found: Hyperparameters = {}
    for name in names:
        values = [group[name] for group in groups]
        if isinstance(values[0], (tuple, list)):
            for place, part in enumerate(zip(*values, strict=True)):
                found[f"{name} {place}"] = [float(value) for value in part]
        else:
            found[name] = values
    return found


def _agree(values: Sequence[float]) -> bool:
    return values.count(values[0]) == len(values)


def _column(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor:
    """Return the members' values as a column, shape [members, 1]."""
    return torch.tensor(values, dtype=rows.dtype, device=rows.device)[:, None]


def _factor(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor | float:
    """Return the members' values as one number if they agree, which is faster, or as a column."""
    return values[0] if _agree(values) else _column(values, rows)


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
        if versions_of(self._counters) != self._versions:
            return False
        if self._watch.is_same():
            return True
        self._hyper = []
        return self._watch.is_alike()

    def step(self) -> None:
        """See `RowOptimizer`."""
        self._hyper = self._hyper or [
            read_hyperparameters(_groups(self._optimizers, segment), self._formula.names) for segment in self._segments
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
        self._versions = versions_of(self._counters)
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
        self._versions = versions_of(self._counters)
        self._watch.note()

    def _share(self) -> None:
        """Make the states of the members' optimizers views of the rows' states."""
        for segment, states, counters in zip(self._segments, self._states, self._counters, strict=True):
            for row, (optimizer, member) in enumerate(zip(self._optimizers, segment.members, strict=True)):
                begun = counters[row].tolist()
                names = self._formula.states(optimizer.param_groups[segment.place[1]])
                for place, parameter in enumerate(member):
                    if not begun[place]:
                        continue
                    own = {name: segment.of(states[name], row, place) for name in names}
                    counted = {} if isinstance(optimizer, optim.SGD) else {"step": counters[row, place]}
                    if counted or own:
                        optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **counted, **own}
        self._watch.note()


def has_kernels(segments: Sequence[Segment]) -> bool:
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


def _groups(optimizers: Sequence[Optimizer], segment: Segment) -> list[dict[str, Any]]:
    return [optimizer.param_groups[segment.place[1]] for optimizer in optimizers]


def _begun(state: dict[str, Any]) -> bool:
    """Return whether SGD, which counts no steps, has made one."""
    return state.get("momentum_buffer") is not None
