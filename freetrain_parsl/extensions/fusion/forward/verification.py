"""Proof by example: one step of an array is computed fused and one by one, and everything is compared."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.forward.adapters import common_shape, padded
from freetrain_parsl.extensions.fusion.forward.forward import Stacked, fused_call
from freetrain_parsl.extensions.fusion.forward.operators import reason_of
from freetrain_parsl.extensions.fusion.forward.outputs import opened
from freetrain_parsl.extensions.fusion.forward.shared_base import ChangesShared, SharedTensor
from freetrain_parsl.extensions.fusion.forward.sparse import is_sparse
from freetrain_parsl.training.checkpoints.copy_on_write import clone_of, is_clone, is_clone_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from freetrain_parsl.extensions.fusion.engine.per_member import Differing, RandomStreams

# Largest difference, relative to the largest magnitude: of the same sums in another order.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# A tensor whose values cancel out is compared with this part of the largest magnitude of its kind.
_PART_OF_LARGEST = 0.1


@dataclass(frozen=True)
class _Step:
    """What a forward and a backward pass produce, by name: stacks of all members' rows."""

    outputs: dict[str, Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    attributes: list[dict[str, Any]]  # that models have assigned: those of each, or of all
    tolerance: float = 0.0


def verify(
    models: Sequence[nn.Module],
    functions: Sequence[Callable[..., Any]],
    parameters: Mapping[str, torch.Tensor | SharedTensor],
    buffers: Mapping[str, torch.Tensor | SharedTensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    streams: RandomStreams,
    *,
    differing: Differing | None = None,
) -> str | None:
    """Compute a step fused and one by one, and compare outputs, gradients and buffers.

    The gradients are those of a sum with fixed weights over all outputs. Parameters, buffers, arguments and random
    numbers are as before afterwards.

    Parameters
    ----------
    models
        Each member's own model, with the values that the stacks have. The first one is the template.
    functions
        Each member's own function, such as its model's ``__call__``.
    parameters, buffers, args, kwargs, streams, differing
        As for `fused_call`.

    Returns
    -------
    str or None
        What differs, or why the call cannot be fused; None if both ways have the same results.

    Raises
    ------
    ChangesShared
        As `fused_call`.
    """
    given = (args, dict(kwargs))
    states = _states(streams, len(models))
    try:
        with torch.enable_grad(), _without_tf32():
            fused = _fused(models[0], functions[0], parameters, buffers, given, streams, differing or {})
            if isinstance(fused, str):
                return fused
            _restore(streams, states)
            serial = _serial(models, functions, given, streams)
    finally:
        _restore(streams, states)
    return _difference(fused, serial)


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute in full precision on GPUs: the default of convolutions and recurrent networks hides small errors."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _fused(
    template: nn.Module,
    function: Callable[..., Any],
    parameters: Mapping[str, torch.Tensor | SharedTensor],
    buffers: Mapping[str, torch.Tensor | SharedTensor],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    streams: RandomStreams,
    differing: Differing,
) -> _Step | str:
    """Compute the step of all members as one, or return why it cannot be."""
    args, kwargs = _cloned(given)
    # Each tensor once, by its first name, as a model alone lists it: others can be tied to it.
    leaves = {name: _copied(parameters[name]) for name, _ in template.named_parameters()}
    own = {name: _copied(buffers[name]) for name, _ in template.named_buffers()}
    assigned: dict[str, Any] = {}
    try:
        with _attributes_kept(template):  # restored in place, so after the backward pass, which may need them
            output = fused_call(
                template, function, leaves, own, args, kwargs, streams, differing=differing, assigned=assigned
            )
            outputs = _named(output)
            gradients = _gradients(outputs, {**leaves, **_arguments((args, kwargs))})
    except ChangesShared:
        raise
    except (CannotFuse, RuntimeError) as error:  # an error of the model itself occurs without fusion, too
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise  # the next time memory may suffice
        return reason_of(error)
    rows = {
        name: each.tensor.expand(len(streams), *each.tensor.shape) if isinstance(each, SharedTensor) else each
        for name, each in own.items()
    }
    return _Step(outputs, gradients, rows, [assigned])


class _Precision(TorchFunctionMode):
    """Notes the tolerance of the least precise type that a computation uses, such as under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.tolerance = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.tolerance = max(self.tolerance, _TOLERANCES.get(result.dtype, 0.0))
        return result


def _serial(
    models: Sequence[nn.Module],
    functions: Sequence[Callable[..., Any]],
    given: tuple[tuple[Any, ...], dict[str, Any]],
    streams: RandomStreams,
) -> _Step:
    """Compute the step of each member with its own model."""
    args, kwargs = _cloned(given)
    arguments = _arguments((args, kwargs))
    outputs, gradients, buffers, attributes = [], [], [], []
    with _Precision() as precision:
        for member, (model, function) in enumerate(zip(models, functions, strict=True)):
            row_args, row_kwargs = tree_map(functools.partial(_row, member=member), (args, kwargs))
            # Members' buffers can be rows of one tensor, so that each backward pass precedes the next forward pass.
            with _restored(model) as assigned:
                with streams.of(member):
                    output = _named(function(*row_args, **row_kwargs))
                stacks = {name: _stack([leaf]) for name, leaf in output.items()}
                gradients.append(_gradients(stacks, {**dict(model.named_parameters()), **arguments}))
                outputs.append({name: _detached(leaf) for name, leaf in output.items()})
                buffers.append({name: buffer.detach().clone() for name, buffer in model.named_buffers()})
                attributes.append(assigned())
    return _Step(
        {name: _stack([output.get(name) for output in outputs]) for name in outputs[0]},
        {
            name: torch.stack(rows).sum(0) if name in arguments else torch.stack(rows)
            for name in gradients[0]
            if (rows := _padded([each[name] for each in gradients]))
        },
        {name: torch.stack([each[name] for each in buffers]) for name in buffers[0]},
        attributes,
        precision.tolerance,
    )


def _padded(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    shape = common_shape(row.shape for row in rows)
    return [padded(row, shape) for row in rows]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[Callable[[object], bool]]:
    """Restore tensors that are attributes of a model, but no buffers, if it changes them in place.

    Yields
    ------
    callable
        Returns whether a value is such a tensor, and has been changed.
    """
    kept = {
        id(value): (value, value._version, value.detach().clone())
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor) and not value.is_inference()
    }

    def changed(value: object) -> bool:
        known = kept.get(id(value))
        return known is not None and known[0]._version != known[1]

    try:
        yield changed
    finally:
        for value, _, before in kept.values():
            if changed(value):
                value.detach().copy_(before)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[Callable[[], dict[str, Any]]]:
    """Restore a model's buffers, parameters and attributes afterwards, whether it changes them or assigns others.

    Yields
    ------
    callable
        Returns path -> value of the attributes that it has assigned.
    """
    modules = [(path, vars(module), dict(vars(module))) for path, module in model.named_modules()]

    def assigned() -> dict[str, Any]:
        return {
            f"{path}.{name}".lstrip("."): value
            for path, now, before in modules
            for name, value in now.items()
            if name not in before
            or changed(value)
            or not (before[name] is value or _equal_numbers(before[name], value))
        }

    tensors: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (place, key, tensor, clone_of(tensor) if is_clone(tensor) else tensor.detach().clone())
        for module in model.modules()
        for place in (module._buffers, module._parameters)
        for key, tensor in place.items()
        if tensor is not None
    ]
    try:
        with _attributes_kept(model) as changed:
            yield assigned
    finally:
        for _, now, before in modules:
            now.clear()
            now.update(before)
        for place, key, tensor, values in tensors:
            place[key] = tensor
            if not is_clone(values):
                tensor.data.copy_(values)
            elif not is_clone_of(tensor, values):
                tensor.data = values


def _row(leaf: Any, member: int) -> Any:
    return leaf.tensor[member] if isinstance(leaf, Stacked) else leaf


def _stack(rows: list[Any]) -> Any:
    if all(isinstance(row, torch.Tensor) and row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    return rows


def _copied(tensor: torch.Tensor | SharedTensor) -> torch.Tensor | SharedTensor:
    return SharedTensor(clone_of(tensor.tensor)) if isinstance(tensor, SharedTensor) else _copy(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with gaps between its rows where the tensor has such, as stacks have: operators look at that."""
    copied = tensor.detach().clone()
    if not is_sparse(tensor) and tensor.dim() and tensor.stride(0) > tensor[:1].numel():
        apart = copied.new_empty(len(tensor), tensor[:1].numel() + 1)
        copied = apart.as_strided(copied.shape, (apart.stride(0), *copied.stride()[1:])).copy_(copied)
    return copied.requires_grad_(tensor.requires_grad)


def _cloned(given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Stacked):
            return Stacked(_copy(leaf.tensor))
        return _copy(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return cast("tuple[tuple[Any, ...], dict[str, Any]]", tree_map(clone, given))


def _named(output: Any) -> dict[str, Any]:
    return {f"output {position}": leaf for position, leaf in enumerate(opened(output)[0])}


def _arguments(given: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors among the arguments by a name."""
    leaves = [leaf.tensor if isinstance(leaf, Stacked) else leaf for leaf in tree_flatten(given)[0]]
    return {f"argument {at}": leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _gradients(
    outputs: Mapping[str, Any], leaves: Mapping[str, torch.Tensor | SharedTensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients of a sum with fixed weights of all outputs."""
    sources = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, SharedTensor) and leaf.requires_grad}
    total = [
        (output * torch.cos(torch.arange(output[0].numel(), device=output.device)).view(output[0].shape)).sum().double()
        for output in outputs.values()
        if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    if not total or not sources:
        return {}
    gradients: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        torch.stack(total).sum(), list(sources.values()), allow_unused=True
    )
    return {
        name: torch.zeros_like(source) if gradient is None else gradient
        for (name, source), gradient in zip(sources.items(), gradients, strict=True)
    }


def _states(streams: RandomStreams, size: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    states = []
    for member in range(size):
        with streams.of(member):
            states.append((torch.get_rng_state(), torch.cuda.get_rng_state_all() if _cuda() else []))
    return states


def _restore(streams: RandomStreams, states: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
    for member, (state, of_devices) in enumerate(states):
        with streams.of(member):
            torch.set_rng_state(state)
            if of_devices:
                torch.cuda.set_rng_state_all(of_devices)


def _cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _difference(fused: _Step, serial: _Step) -> str | None:
    for name, values in serial.outputs.items():
        if not isinstance(values, torch.Tensor) and any(value != fused.outputs.get(name) for value in values):
            return f"{name} differs from that of the training job alone"
    (attributes,) = fused.attributes
    for own in serial.attributes:
        for name in attributes.keys() | own.keys():
            if name not in attributes or name not in own or not _equal(attributes[name], own[name]):
                return f"the attribute {name} that the model assigns differs from that of the training job alone"
    for kind in ("outputs", "gradients", "buffers"):
        expected = {name: value for name, value in getattr(serial, kind).items() if isinstance(value, torch.Tensor)}
        found = getattr(fused, kind)
        if found.keys() != getattr(serial, kind).keys():
            return f"the {kind} are others than those of the training job alone"
        magnitudes = {name: _magnitude(value) for name, value in expected.items()}
        largest = max(magnitudes.values(), default=0.0)
        for name, value in expected.items():
            error = _error(found[name], value)
            limit = max(serial.tolerance, _TOLERANCES.get(value.dtype, 0.0))
            if not error <= limit * max(magnitudes[name], _PART_OF_LARGEST * largest):  # the error may be NaN
                what = f"the gradient of {name}" if kind == "gradients" else name
                return f"{what} differs by {error:.1e} from that of the training job alone"
    return None


def _equal_numbers(one: object, other: object) -> bool:
    return isinstance(one, (int, float)) and type(one) is type(other) and one == other


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and _error(one, other) == 0.0
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # NaN


def _magnitude(values: torch.Tensor) -> float:
    finite = values.detach().double()
    finite = finite[finite.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference; NaN and infinity must be at the same places."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    one, other = one.detach().double(), other.detach().double()
    same = (one == other) | (one.isnan() & other.isnan())
    return float(torch.where(same, 0.0, (one - other).abs()).max()) if one.numel() else 0.0
