"""Values that a training loop carries from step to step: counters, best values, averages, hidden states.

The session keeps them: they are saved in every checkpoint, restored where the function asks for them, and sent to the
processes that join. A batch that is interrupted by the failure of a process is repeated, so its changes are undone:
plain values and small tensors are copied when a batch begins, large ones when it is interrupted, which undoes what
follows the step. If a large one has changed before the step, the training job resumes from its checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from freetrain_parsl.errors import UsageError
from freetrain_parsl.training.checkpoints.format import check_restorable
from freetrain_parsl.training.group.state_transfer import pass_on
from freetrain_parsl.training.undo import PLAIN, Remembered, copied, has_state, remember, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from freetrain_parsl.training.group.process_group import Group

__all__ = ["LoopState", "LoopStates", "LoopValue", "content_of"]

_ALLOWED = "numbers, strings, tensors, lists, tuples and dictionaries of these, or objects with state_dict"
_TO_PREPARE = (Optimizer, LRScheduler, torch.amp.GradScaler)


class LoopState:
    """Values of a training loop, as attributes; made by ``session.state``.

    Attributes can be read and assigned, but not added. In a batch that is interrupted by the failure of a process,
    assignments after the interrupted step have no effect, as the batch is repeated.

    Raises
    ------
    UsageError
        At an assignment: the name is not declared, or the value cannot be saved.
    """

    __slots__ = ("__dict__", "_is_frozen")
    _is_frozen: Callable[[], bool]

    def __init__(self, values: Mapping[str, Any], is_frozen: Callable[[], bool]) -> None:
        object.__setattr__(self, "_is_frozen", is_frozen)
        for name, value in values.items():
            vars(self)[name] = _checked(name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        values = vars(self)
        if name not in values:
            raise UsageError(
                f"session.state: {name!r} is not declared, so it would not be saved; it has {', '.join(values)}: add "
                f"{name}=… to the call of session.state"
            )
        if has_state(value) and type(value) is not type(values[name]):
            raise UsageError(
                f"session.state: {name!r} began as {_kind(values[name])}, and a {type(value).__name__} can only be "
                f"restored into one: declare it with session.state({name}=…), or keep its state_dict() instead"
            )
        value = _checked(name, value)
        if not self._is_frozen():
            values[name] = value

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"session.state: {name!r} cannot be deleted; assign None")

    def __repr__(self) -> str:
        return f"LoopState({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class LoopStates:
    """The loop state of a training job: the values that its members share, and each member's own."""

    def __init__(self) -> None:
        self._shared: list[LoopState] = []
        self._own: list[LoopState] = []
        self._declared: dict[str, Any] = {}  # name -> its first value, whose memory is the user's to share
        self._saved: dict[str, Remembered] = {}  # at the beginning of the batch; empty if it cannot be interrupted
        self._modules: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {}  # the tensors of modules, by name
        self._interrupted = False
        self._repeats = False  # whether an interrupted batch is repeated: other members may have made its step

    def __bool__(self) -> bool:
        return bool(self._declared)

    def declare(self, values: Mapping[str, Any], *, per_process: bool, device: torch.device) -> LoopState:
        """Keep values from now on; modules move to the device, as with ``session.prepare``.

        Raises
        ------
        UsageError
            A name is taken or cannot be used, or a value cannot be saved.
        CheckpointError
            The state of an object cannot be saved.
        """
        if not values:
            raise UsageError("session.state needs names and first values: session.state(it=0, best=float('inf'))")
        for name in values:
            if name in self._declared:
                raise UsageError(f"session.state: {name!r} is declared twice; choose another name")
            if name.startswith("_"):
                raise UsageError(f"session.state: {name!r} begins with an underscore; choose another name")
        state = LoopState(values, lambda: self._repeats if per_process else self._interrupted)
        for name, value in vars(state).items():
            if isinstance(value, nn.Module):
                value.to(device)
            if has_state(value):
                check_restorable(f"session.state's {name}", value.state_dict())
        (self._own if per_process else self._shared).append(state)
        self._declared |= {name: vars(state)[name] for name in values}
        return state

    def shared(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values that are the same on all members."""
        for state in self._shared:
            yield from vars(state).items()

    def own(self) -> Iterator[tuple[str, Any]]:
        """Yield the names and values that each member has for itself."""
        for state in self._own:
            yield from vars(state).items()

    def first_values(self) -> Iterator[Any]:
        """Yield the values given to ``session.state``: code before the loop may refer to these objects."""
        yield from self._declared.values()

    # ── interrupted batches ───────────────────────────────────────────────────────────────────────

    def open_batch(self, group: Group) -> None:
        """Remember the values at the beginning of a batch; a single member's batch is never interrupted."""
        if self._declared:
            self._saved = {} if group.size == 1 else {name: self._remember(name, value) for name, value in self._all()}

    def can_be_undone(self, *, has_stepped: bool) -> bool:
        """Return whether all changes since the batch began can be undone.

        Changes of large tensors and modules before the step cannot, and none that may belong to an earlier step of
        the same batch, which is not repeated.
        """
        return not self._saved or (not has_stepped and all(saved.can_be_put_back for saved in self._saved.values()))

    def cut(self) -> None:
        """Undo changes of the shared values, before they are sent; assignments have no effect until `release`."""
        self._interrupted = self._repeats = True
        self._put_back(self._shared)

    def hold(self, *, repeats: bool) -> None:
        """Remember the values in the new group, so that `release` undoes what the user's code still changes.

        Parameters
        ----------
        repeats
            Whether the batch is repeated. If others have made its step, this member's own values are those after it.
        """
        self._repeats = repeats
        if repeats:
            self._put_back(self._own)
        self._saved = {name: remember(value, whole=True) for name, value in self._all()}

    def release(self) -> None:
        """Undo what has changed in place since `hold`, and let assignments have an effect again."""
        if self._interrupted:
            self._put_back([*self._shared, *(self._own if self._repeats else ())])
            self._interrupted = self._repeats = False

    def _put_back(self, states: Sequence[LoopState]) -> None:
        for state in states:
            for name in vars(state):
                if name in self._saved:
                    vars(state)[name] = self._saved[name].put_back()

    def _remember(self, name: str, value: Any) -> Remembered:
        if not isinstance(value, nn.Module):
            return remember(value)
        if name not in self._modules or self._modules[name][0] is not value:
            self._modules[name] = value, tuple(tensors_of(value))
        return remember(value, tensors=self._modules[name][1])

    def _all(self) -> Iterator[tuple[str, Any]]:
        yield from self.shared()
        yield from self.own()

    # ── saving and restoring ──────────────────────────────────────────────────────────────────────

    def gather(self, group: Group) -> list[dict[str, Any]]:
        """Return each member's own values, by rank, on the first member; all call this."""
        mine = self._contents(self._own)
        parts = [mine]
        if self._own:
            for rank in range(1, group.size):
                part = pass_on(group, [rank], [0], mine if group.rank == rank else None)
                parts.append(part if group.is_first else {})
        return parts

    def state(self, own: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return the shared values, and each member's own as gathered."""
        return {"shared": self._contents(self._shared), "own": [dict(part) for part in own]}

    def load(self, state: Mapping[str, Any], *, rank: int | None = None, names: set[str] | None = None) -> None:
        """Load a state.

        Parameters
        ----------
        state
            The state.
        rank
            Rank whose own values are also loaded; ``None``: each member keeps its own.
        names
            Only these; ``None``: all.
        """
        self._fill(self._shared, state["shared"], names)
        own = state["own"]
        if rank is not None and rank < len(own):
            self._fill(self._own, own[rank], names)

    def _fill(self, states: Sequence[LoopState], contents: Mapping[str, Any], names: set[str] | None) -> None:
        for state in states:
            for name, value in vars(state).items():
                if name in contents and (names is None or name in names):
                    # What the function has made before its loop may be known elsewhere by another name. What it
                    # assigned later may be a view of other memory, such as a batch.
                    in_place = value is self._declared[name]
                    vars(state)[name] = _load(value, contents[name], in_place=in_place)

    def _contents(self, states: Sequence[LoopState]) -> dict[str, Any]:
        return {
            name: _to_save(_checked(name, value, deep=True)) for state in states for name, value in vars(state).items()
        }


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _checked(name: str, value: Any, *, deep: bool = False, top: bool = True) -> Any:
    """Return a value that can be saved: numpy's numbers become Python's.

    Parameters
    ----------
    name
        Name of the attribute, for the message.
    value
        The value.
    deep
        Whether to check the elements of lists and dictionaries, which cannot be replaced.
    top
        Whether it is the attribute itself.

    Raises
    ------
    UsageError
        It cannot be saved.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in PLAIN or isinstance(value, torch.Tensor):
        return value
    if kind in (list, tuple, dict, OrderedDict) or (top and kind is deque):
        if deep or kind is tuple:
            for each in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
                _checked(name, each, deep=True, top=False)
        return value
    if top and has_state(value):
        if isinstance(value, _TO_PREPARE):
            raise UsageError(f"session.state: {name!r} is a {kind.__name__}; pass it to session.prepare")
        return value
    where = f"{name!r} is" if top else f"{name!r} contains"
    remedy = {np.ndarray: "; convert it: torch.as_tensor(…)", torch.Generator: "; keep its get_state()"}.get(kind, "")
    raise UsageError(f"session.state: {where} a {kind.__name__}{remedy}; it holds {_ALLOWED}")


class LoopValue(NamedTuple):
    """One value of the loop, as `filled` needs it: its content as a state."""

    value: Any

    def state_dict(self) -> Any:
        """Return the content."""
        return content_of(self.value)

    def load_state_dict(self, content: Any) -> NoReturn:
        """Values are loaded by `LoopStates.load`."""
        raise NotImplementedError


def content_of(value: Any) -> Any:
    """Return a value of the loop as tensors and plain values, without copying tensors."""
    if has_state(value):
        return value.state_dict()
    return list(value) if isinstance(value, deque) else value


def _to_save(value: Any) -> Any:
    """Return the content of a value, with numpy's numbers as Python's; tensors are detached, but not copied."""
    content = content_of(value)
    if isinstance(content, np.generic):
        return content.item()
    if isinstance(content, torch.Tensor):
        return content.detach()
    if type(content) in (list, tuple):
        return type(content)(map(_to_save, content))
    if isinstance(content, dict):
        result = content.copy()  # keeps the versions that torch attaches to the state of a module
        for key, each in content.items():
            result[key] = _to_save(each)
        return result
    return content


def _load(value: Any, content: Any, *, in_place: bool) -> Any:
    """Return a value with another content; with `in_place` tensors and containers stay the same objects if they can.

    Objects with a state always stay.
    """
    if has_state(value):
        value.load_state_dict(copied(content))
        return value
    if isinstance(value, torch.Tensor) and isinstance(content, torch.Tensor):
        if in_place and value.shape == content.shape and value.dtype == content.dtype:
            with torch.no_grad():
                value.copy_(content)
            return value
        return content.detach().to(value.device, copy=True)
    if isinstance(value, deque) and isinstance(content, list):
        fresh = deque(map(copied, content), value.maxlen)
        if not in_place:
            return fresh
        value.clear()
        value.extend(fresh)
        return value
    if in_place and type(value) is type(content) and isinstance(value, dict):
        items = {key: _load(value.get(key), each, in_place=True) for key, each in content.items()}
        value.clear()
        value.update(items)
        return value
    if in_place and type(value) is type(content) is list:
        known = (*value, *[None] * len(content))
        value[:] = [_load(mine, each, in_place=True) for mine, each in zip(known, content, strict=False)]
        return value
    return copied(content)
