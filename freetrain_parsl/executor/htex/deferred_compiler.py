"""The front end of torch's compiler, imported when something uses it rather than with the first optimizer.

torch's optimizers, and the start of a process group, import ``torch._dynamo``, which takes as long as the import of
torch itself, for calls that do nothing while nothing has been compiled. A module with these calls stands for it here;
whatever else is asked of it, and any import of one of its submodules, imports the real one first.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
import threading
import weakref
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["defer_compiler"]

_NAME: Final = "torch._dynamo"
_KEPT: Final = "__dynamo_disable"  # attribute of a function, in which `torch._compile` keeps what `disable` returned


def defer_compiler() -> None:
    """Let ``torch._dynamo`` be imported by what uses it; has no effect if it has been imported. Imports torch."""
    import torch  # noqa: F401 - some versions import the compiler with it

    if _NAME in sys.modules:
        return
    stand_in = _StandIn()
    sys.meta_path.insert(0, _Submodules(stand_in))
    stand_in.put_in_place()


class _StandIn:
    """Stands for ``torch._dynamo``, with what torch calls in each training job.

    Attributes
    ----------
    module
        A plain module, as pickle, cloudpickle and dill treat modules by their exact type.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec(_NAME)
        assert spec is not None, "a part of torch"
        self._lock = threading.Lock()
        # By identity, since callable objects need not have a hash.
        self._disabled: weakref.WeakValueDictionary[tuple[int, bool], Callable[..., Any]] = (
            weakref.WeakValueDictionary()
        )
        self.module = _on_demand(_NAME, self.load)
        trace_rules = _on_demand(f"{_NAME}.trace_rules", lambda: self.load().trace_rules)
        vars(trace_rules)["clear_lru_cache"] = self._clear_lru_cache
        vars(self.module).update(
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            __package__=_NAME,
            __path__=list(spec.submodule_search_locations or ()),
            trace_rules=trace_rules,
            graph_break=_graph_break,
            disable=self._disable,
        )
        self._own = frozenset(vars(self.module))

    @property
    def is_in_place(self) -> bool:
        """Whether the real module has not been imported."""
        return sys.modules.get(_NAME) is self.module

    def put_in_place(self) -> None:
        """Let whoever imports ``torch._dynamo`` find the module."""
        import torch

        sys.modules[_NAME] = torch._dynamo = self.module  # noqa: SLF001 - in whose place it is

    def load(self) -> Any:
        """Import the real module in the place of this one; what has been disabled, or set here, remains so."""
        import torch

        with self._lock:
            if first := self.is_in_place:
                del sys.modules[_NAME]
                vars(torch).pop("_dynamo", None)
        try:
            real = importlib.import_module(_NAME)  # threads that are here at the same time wait for each other
        except BaseException:
            if first:  # it may be interrupted, and is imported by the next use then
                self.put_in_place()
            raise
        if first:
            vars(real).update({name: value for name, value in vars(self.module).items() if name not in self._own})
            while self._disabled:
                (_, recursive), function = self._disabled.popitem()
                setattr(function, _KEPT, real.disable(function, recursive, wrapping=False))
        return real

    def _disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:  # noqa: FBT001, FBT002 - torch's
        """Return a function that is not compiled: itself, until something can be."""
        if fn is not None and options == {"wrapping": False}:  # `torch._compile` asks so, and keeps what it gets
            self._disabled[id(fn), recursive] = fn
            if self.is_in_place:
                return fn
        return self.load().disable(fn, recursive, **options)

    def _clear_lru_cache(self) -> None:
        """Do nothing, as what clears caches that nothing has filled."""
        if not self.is_in_place:
            self.load().trace_rules.clear_lru_cache()


def _graph_break(*arguments: Any, **options: Any) -> None:
    """Do nothing, as the real one outside compiled code."""
    import torch._dynamo  # in compiled code, without another way to it that could not be compiled

    if torch._dynamo.graph_break is not _graph_break:  # noqa: SLF001 - what it stands for
        torch._dynamo.graph_break(*arguments, **options)  # noqa: SLF001 - the same


def _on_demand(name: str, load: Callable[[], Any]) -> ModuleType:
    """Return a module whose missing attributes are those of the one that is loaded."""

    def missing(attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__all__":  # what looks through all modules asks for such
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module)
        return getattr(load(), attribute)

    module = ModuleType(name, "A part of torch's compiler, which has not been used yet.")
    vars(module).update(__getattr__=missing, __dir__=lambda: dir(load()))
    return module


class _Submodules(MetaPathFinder):
    """Imports ``torch._dynamo`` before its first submodule, as the interpreter would without a module in its place."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a submodule is if the real module has just imported it, else nothing."""
        if not name.startswith(f"{_NAME}.") or not self._stand_in.is_in_place:
            return None
        self._stand_in.load()
        imported = sys.modules.get(name)
        if imported is None or imported.__spec__ is None:
            return None
        spec = copy.copy(imported.__spec__)
        spec.loader = _Imported(imported)
        vars(imported)["__spec__"] = spec  # which the interpreter prefers to the one that is returned
        return spec


class _Imported(Loader):
    """Takes a module that has been imported as it is: the interpreter would run it once more."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own description again."""
        vars(module)["__spec__"] = self._spec  # torch._dynamo.config refuses to have attributes set
