"""Methods that act once per optimizer step, such as ``scheduler.step()``, in a loop that sees a batch in pieces.

The user's loop calls them after each piece, or after a batch that was cut off by a failure. Their classes are patched
while objects of them are guarded, so that the objects keep their class, can be pickled, and have the same state.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["guard"]

_guards: WeakKeyDictionary[Any, Callable[[], bool]] = WeakKeyDictionary()
_originals: dict[tuple[type, str], Any] = {}


def guard(thing: Any, method: str, acts: Callable[[], bool]) -> Callable[[], None]:
    """Let a method of an object do nothing, and return ``None``, whenever ``acts()`` is false.

    Parameters
    ----------
    thing
        The object; its class defines or inherits the method.
    method
        The method's name.
    acts
        Whether a call has an effect now.

    Returns
    -------
    release
        Ends it, and restores the class if no other object of it is guarded.
    """
    owner = next(kind for kind in type(thing).__mro__ if method in vars(kind))
    if (owner, method) not in _originals:
        _originals[owner, method] = vars(owner)[method]
        setattr(owner, method, _guarded(vars(owner)[method]))
    _guards[thing] = acts

    def release() -> None:
        _guards.pop(thing, None)
        if not any(isinstance(other, owner) for other in _guards) and (owner, method) in _originals:
            setattr(owner, method, _originals.pop((owner, method)))

    return release


def _guarded(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        acts = _guards.get(self)
        return original(self, *args, **options) if acts is None or acts() else None

    return call
