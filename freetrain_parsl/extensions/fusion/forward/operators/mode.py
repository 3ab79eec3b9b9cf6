"""The mode in which operators of torch follow rules for stacked tensors, and the rule for all others: row by row."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from freetrain_parsl.errors import CannotFuse
from freetrain_parsl.extensions.fusion.engine.per_member import PerMember, of_member
from freetrain_parsl.extensions.fusion.forward.operators.functions import FunctionCall
from freetrain_parsl.extensions.fusion.forward.shared_base import ChangesShared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from freetrain_parsl.extensions.fusion.engine.per_member import RandomStreams
    from freetrain_parsl.extensions.fusion.forward.vmap_level import VmapLevel

# A rule is called with the mode, the operator and the operator's arguments. Stacked tensors and others come mixed.
# It returns NotImplemented for arguments that torch.vmap handles well.
Rule = Any

# Functions of torch.nn.functional in Python that call nothing that has a rule: their inner calls need not be seen.
_OPAQUE: set[Any] = {
    *(F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.binary_cross_entropy, F.elu, F.glu, F.group_norm),
    *(F.binary_cross_entropy_with_logits, F.hardtanh, F.huber_loss, F.instance_norm, F.interpolate, F.l1_loss),
    *(F.layer_norm, F.leaky_relu, F.local_response_norm, F.log_softmax, F.mish, F.mse_loss, F.normalize),
    *(F.relu, F.relu6, F.rms_norm, F.selu, F.sigmoid, F.silu, F.smooth_l1_loss, F.softmax, F.softmin, F.tanh),
}


_OPERATOR = "freetrain_operator"  # attribute of an error: which operator raised it


def reason_of(error: Exception) -> str:
    """Return the first line of an error of a fused call, after the operator that raised it."""
    text = str(error).strip().partition("\n")[0]
    operator = vars(error).get(_OPERATOR)
    return text if operator is None or isinstance(error, CannotFuse) else f"{operator}: {text}"


def _never(*_: Any) -> bool:
    return False


class _Transparent:
    """Copies of torch's composite functions in Python whose inner calls a mode sees.

    Such a function asks whether a mode is active, and then hands itself to the mode as a whole. The copy does not ask.
    """

    def __init__(self) -> None:
        self._globals = {
            module.__name__: {
                **vars(module),
                "has_torch_function": _never,
                "has_torch_function_unary": _never,
                "has_torch_function_variadic": _never,
            }
            for module in (F, torch.functional)
        }
        self._copies: dict[Any, Any] = {}

    def copy_of(self, function: Any) -> Any:
        """Return the copy of a function, or None if it is not a composite in Python."""
        if type(function) is not types.FunctionType or function in _OPAQUE:
            return None
        if function not in self._copies:
            self._copies[function] = self._copy(function)
        return self._copies[function]

    def _copy(self, function: types.FunctionType) -> Any:
        replaced = self._globals.get(function.__module__)
        if replaced is None or function.__globals__.get("__name__") != function.__module__:
            return None
        copy = types.FunctionType(
            function.__code__, replaced, function.__name__, function.__defaults__, function.__closure__
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy


_TRANSPARENT = _Transparent()


def name_of(function: Any) -> str:
    """Return the name of an operator for messages."""
    name = getattr(function, "__name__", None) or str(function)
    if name == "__get__":  # of a property of tensors
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


def _writes(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator changes its first argument, by torch's conventions."""
    name = name_of(function)
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name == "__setitem__" or (name.startswith("__i") and name not in {"__invert__", "__index__", "__int__"})
    return in_place or operator or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


class FusedOperators(TorchFunctionMode):
    """Operators follow their rule, if they have one, else `torch.vmap`, else they run row by row.

    Parameters
    ----------
    level
        The open level.
    streams
        The members' random numbers.
    rules
        Operator -> rule.
    """

    def __init__(self, level: VmapLevel, streams: RandomStreams, rules: Mapping[Any, Rule]) -> None:
        super().__init__()
        self.level = level
        self.streams = streams
        self.size = level.size
        self.serial: set[str] = set()  # names of operators that ran row by row
        self._rules = rules
        self._saved_tensor_hooks = _saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._computed(func, args, kwargs or {})
        except Exception as error:
            vars(error).setdefault(_OPERATOR, name_of(func))  # the innermost
            raise

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _saved_tensor_hooks() != self._saved_tensor_hooks:
            raise CannotFuse("activation checkpointing, or other hooks on saved tensors, inside the model")
        if not self.level.is_innermost():
            raise CannotFuse("torch.vmap, or another transform of torch.func, inside the model")
        if isinstance(func, FunctionCall):
            func.check()
            return self.row_by_row(func, args, kwargs)
        rule = self._rules.get(func)
        if rule is not None:
            try:
                result = rule(self, func, *args, **kwargs)
            except RuntimeError:  # for a wrong call, the first row raises the error that the user knows
                result = self.row_by_row(func, args, kwargs)
            if result is not NotImplemented:
                return result
        copy = _TRANSPARENT.copy_of(func)
        if copy is not None:
            with self:
                return copy(*args, **kwargs)
        return self._vectorized(func, args, kwargs)

    @contextlib.contextmanager
    def hooks_on_saved_tensors(self) -> Iterator[None]:
        """Allow the innermost hooks on saved tensors in this context."""
        before, self._saved_tensor_hooks = self._saved_tensor_hooks, _saved_tensor_hooks()
        try:
            yield
        finally:
            self._saved_tensor_hooks = before

    def is_stacked(self, value: object) -> bool:
        """Return whether a value is a tensor that can differ between members."""
        return self.level.is_stacked(value)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the plain stack of its rows."""
        return self.level.rows(tensor)

    def wrap(self, stack: torch.Tensor, dimension: int = 0) -> torch.Tensor:
        """Return the tensor that has, for member `i`, index `i` of a dimension of `stack`."""
        return self.level.wrap(stack, dimension)

    def _vectorized(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Torch has no vectorised form, or the call is wrong: then the first row raises the user's own error.
            return self.row_by_row(func, args, kwargs)

    def row_by_row(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        changes_arguments: bool = False,
    ) -> Any:
        """Call an operator once per member, with the member's rows and random numbers, and stack the results."""
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        stacked = [self.is_stacked(leaf) for leaf in leaves]
        if not any(stacked) and not any(isinstance(leaf, PerMember) for leaf in leaves):
            if any(isinstance(leaf, torch.Generator) for leaf in leaves):  # draws the same for all
                return self.level.draw(lambda: func(*args, **kwargs))
            if self.streams.agree:
                return self.level.draw(lambda: self._once(func, args, kwargs))
        self.serial.add(name_of(func))
        writes = _writes(func, kwargs)
        if writes and leaves and not stacked[0]:
            raise ChangesShared(
                f"{name_of(func)} writes different values into a tensor that is the same for all training jobs"
            )
        # The gradient of `unbind` is a fast stack, but what it returns must not be written to.
        selected = writes or changes_arguments
        stacks = [
            leaf if not differs else self.rows(leaf) if selected else self.rows(leaf).unbind()
            for leaf, differs in zip(leaves, stacked, strict=True)
        ]
        results = self.level.draw(lambda: self._each(func, stacks, stacked, structure))
        return self._combine(name_of(func), results, leaves, stacked)

    def _once(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.streams.shared():
            return func(*args, **kwargs)

    def _each(self, func: Any, stacks: list[Any], stacked: list[bool], structure: Any) -> list[tuple[list[Any], Any]]:
        """Return, per member, the arguments and the result."""
        generators = [leaf for leaf in stacks if isinstance(leaf, torch.Generator)]
        states = [generator.get_state() for generator in generators]
        shared = [leaf for leaf, differs in zip(stacks, stacked, strict=True) if _is_plain(leaf, differs=differs)]
        versions = [tensor._version for tensor in shared]
        results = []
        for member in range(self.size):
            for generator, state in zip(generators, states, strict=True):  # each member has this generator alone
                generator.set_state(state)
            leaves = [
                leaf[member] if differs else of_member(leaf, member)
                for leaf, differs in zip(stacks, stacked, strict=True)
            ]
            args, kwargs = tree_unflatten(leaves, structure)
            with self.streams.of(member):
                results.append((leaves, func(*args, **kwargs)))
            if versions != [tensor._version for tensor in shared]:
                raise ChangesShared(f"{name_of(func)} changes a tensor that is the same for all training jobs")
        return results

    def _combine(self, name: str, results: list[tuple[list[Any], Any]], inputs: list[Any], stacked: list[bool]) -> Any:
        flat = [(given, *tree_flatten(result)) for given, result in results]
        structure = flat[0][2]
        if any(other != structure for _, _, other in flat):
            raise CannotFuse(f"{name} returns different kinds of results for the training jobs")
        combined = []
        for position in range(len(flat[0][1])):
            returned = [
                at
                for at, differs in enumerate(stacked)
                if differs and all(outputs[position] is given[at] for given, outputs, _ in flat)
            ]
            if returned:  # an operator in place returns its argument
                combined.append(inputs[returned[0]])
            else:
                combined.append(self._stack(name, [outputs[position] for _, outputs, _ in flat]))
        return tree_unflatten(combined, structure)

    def _stack(self, name: str, outputs: list[Any]) -> Any:
        if isinstance(outputs[0], torch.Tensor):
            if any(output.shape != outputs[0].shape or output.dtype != outputs[0].dtype for output in outputs):
                raise CannotFuse(f"the result of {name} has another shape or type for each of the training jobs")
            return self.wrap(torch.stack(outputs))
        return same_for_all(name, outputs)


def same_for_all(name: str, values: Sequence[Any]) -> Any:
    """Return the value that an operator has for all members, or refuse."""
    if any(not _same(values[0], value) for value in values[1:]):
        raise CannotFuse(f"{name} of a tensor whose values differ between the training jobs")
    return values[0]


def _same(one: Any, other: Any) -> bool:
    if hasattr(one, "__array__"):
        return type(one) is type(other) and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other) or (one != one and other != other)  # NaN is the same as NaN here


def _is_plain(leaf: Any, *, differs: bool) -> bool:
    return isinstance(leaf, torch.Tensor) and not differs and not leaf.is_inference()


def _saved_tensor_hooks() -> Any:
    """Return the innermost hooks on saved tensors; in a torch without this private function, verification fails."""
    innermost = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return innermost(True) if innermost else None
