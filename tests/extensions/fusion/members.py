"""Arrays of small models: computed fused and one by one."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field

import torch

from freetrain_parsl.extensions.fusion.forward import forward
from freetrain_parsl.extensions.fusion.forward.differences import compare
from freetrain_parsl.extensions.fusion.forward.forward import Stacked, assign, fused_call
from freetrain_parsl.extensions.fusion.forward.outputs import opened, whole

# Differences are relative to the largest magnitude, but of sums whose terms cancel out, such as the gradient of a bias
# before BatchNorm, only rounding errors remain: those of numbers of this magnitude are accepted.
_ROUNDED = 1e-3


class Streams:
    """One generator state per member."""

    def __init__(self, seeds) -> None:
        with torch.random.fork_rng():
            self.states = [self._seeded(seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self.states)

    @property
    def agree(self) -> bool:
        return all(torch.equal(state, self.states[0]) for state in self.states)

    @contextlib.contextmanager
    def of(self, member):
        outside = self._current()
        self._use(self.states[member])
        try:
            yield
        finally:
            self.states[member] = self._current()
            self._use(outside)

    def _seeded(self, seed) -> torch.Tensor:
        torch.manual_seed(seed)
        return self._current()

    def _current(self) -> torch.Tensor:
        """Return the state of the generators of the CPU and, if it is used, the GPU."""
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state())
        return torch.cat(states)

    def _use(self, state) -> None:
        size = len(torch.get_rng_state())
        torch.set_rng_state(state[:size])
        if len(state) > size:
            torch.cuda.set_rng_state(state[size:])

    @contextlib.contextmanager
    def shared(self):
        assert self.agree
        with self.of(0):
            yield
        self.states = [self.states[0]] * len(self.states)


@dataclass
class Comparison:
    """Largest relative difference of outputs, gradients and buffers, and which operators ran row by row."""

    difference: float = 0.0
    serial: set[str] = field(default_factory=set)

    def note(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert torch.equal(found.isnan(), expected.isnan())
        if found.numel():
            found, expected = found.double().nan_to_num(), expected.double().nan_to_num()
            error = (found - expected).abs().max() / (expected.abs().max() + _ROUNDED)
            self.difference = max(self.difference, float(error))


@contextlib.contextmanager
def noting_serial_operators(names: set[str]):
    """Note the operators that a fused call runs row by row."""
    original = forward.fused_operators

    def noting(level, streams):
        mode = original(level, streams)
        mode.serial = names
        return mode

    forward.fused_operators = noting
    try:
        yield
    finally:
        forward.fused_operators = original


def stacks(models):
    """Return the stacks of parameters and buffers, as an array has them."""
    parameters = {
        name: torch.stack([dict(model.named_parameters())[name].detach() for model in models]).requires_grad_(
            first.requires_grad
        )
        for name, first in models[0].named_parameters()
    }
    buffers = {
        name: torch.stack([dict(model.named_buffers())[name] for model in models])
        for name, _ in models[0].named_buffers()
    }
    return parameters, buffers


def made(make, seeds):
    """Return one model per seed; the caller's generator is untouched."""
    models = []
    with torch.random.fork_rng():
        for seed in seeds:
            torch.manual_seed(seed)
            models.append(make())
    return models


def outputs_of(output):
    return [leaf for leaf in opened(output)[0] if isinstance(leaf, torch.Tensor)]


def objective(output):
    """Return a sum of all outputs with different weights."""
    tensors = [leaf for leaf in outputs_of(output) if leaf.requires_grad]
    return sum((leaf * torch.cos(torch.arange(leaf.numel())).view(leaf.shape)).sum() for leaf in tensors)


def rows_of(output, member):
    leaves, structure = opened(output)
    return whole([leaf[member] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure)


def compared(models, inputs, *, shared, seeds, function=None, steps=1) -> Comparison:
    """Compare a fused forward and backward pass with those of each model alone, from own copies.

    `inputs` are those of each member; with `shared`, all use the first one's.
    """
    comparison = Comparison()
    call = function or (lambda model, *arguments: model(*arguments))
    alone = copy.deepcopy(models)
    differing = compare(models)
    parameters, buffers = stacks(models)
    given = [tuple(leaf.clone() for leaf in inputs[0 if shared else member]) for member in range(len(models))]
    arguments = tuple(
        leaves[0].clone() if shared else Stacked(torch.stack(leaves)) for leaves in zip(*given, strict=True)
    )
    streams, own_streams = Streams(seeds), Streams(seeds)
    template = models[0]
    for _ in range(steps):
        assigned: dict[str, object] = {}
        with noting_serial_operators(comparison.serial):
            output = fused_call(
                template,
                lambda *a: call(template, *a),
                parameters,
                buffers,
                arguments,
                {},
                streams,
                differing=differing,
                assigned=assigned,
            )
        assign(models, assigned)
        sum(objective(rows_of(output, member)) for member in range(len(models))).backward()
        for member, model in enumerate(alone):
            with own_streams.of(member):
                expected = call(model, *given[member])
            objective(expected).backward()
            for found, right in zip(outputs_of(rows_of(output, member)), outputs_of(expected), strict=True):
                comparison.note(found.detach(), right.detach())
    for member, model in enumerate(alone):
        for name, parameter in model.named_parameters():
            gradient = parameters[name].grad
            if parameter.grad is None:
                assert gradient is None or not gradient.any()
            else:
                comparison.note(gradient[member], parameter.grad)
        for name, buffer in model.named_buffers():
            comparison.note(buffers[name][member], buffer)
        for path in assigned:
            owner, _, attribute = path.rpartition(".")
            parts = [getattr(each.get_submodule(owner), attribute) for each in (models[member], model)]
            assert torch.equal(*map(torch.as_tensor, parts))
        assert torch.equal(streams.states[member], own_streams.states[member]), "other random numbers were drawn"
    return comparison
