"""Code and values on their way between driver and slots, serialised: the payloads of messages."""

from __future__ import annotations

import io
import sys
from pickle import _Pickler as StockPickler  # dill's is made of it
from types import FunctionType
from typing import TYPE_CHECKING, Any

import dill
from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import deserialize
from parsl.serialize.errors import DeserializationError

from freetrain_parsl.errors import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

__all__ = ["error_in", "pack_training", "settle_with_payload", "unpack_training"]


class _Pickler(dill.Pickler):  # type: ignore[misc]  # untyped
    """dill's, but what can be imported goes by reference even if its module is no attribute of its package.

    dill copies such classes, ``torch.optim.SGD`` among them: the copy is then no ``torch.optim.Optimizer`` any more.
    """

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:  # noqa: FBT001, FBT002 - pickle's signature
        if isinstance(obj, (type, FunctionType)) and id(obj) not in self.memo and _can_be_imported(obj):
            StockPickler.save_global(self, obj)  # type: ignore[attr-defined]  # not in typeshed
        else:
            super().save(obj, save_persistent_id)


def _can_be_imported(thing: type | FunctionType) -> bool:
    found: Any = sys.modules.get(thing.__module__ or "")
    if found is None or thing.__module__ == "__main__":
        return False
    for name in thing.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is thing


def pack_training(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Serialise a call of a training function.

    With the globals that it uses, unlike Parsl's own serialisation: a script or notebook may define its network and
    its data beside the function. What lives in an importable module goes by reference.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, recurse=True).dump((function, args, kwargs))
    return buffer.getvalue()


def unpack_training(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the function, its arguments and its keyword arguments."""
    function, args, kwargs = dill.loads(payload)  # noqa: S301 - from the driver, over the authenticated channel
    return function, args, kwargs


def settle_with_payload(future: Future[Any], payload: bytes) -> None:
    """Resolve a future to a value that a slot sent, or to the reason why it cannot be read here."""
    if future.done():
        return
    try:
        value = deserialize(payload)
    except Exception as error:  # noqa: BLE001 - unpickling runs the value's own code
        future.set_exception(DeserializationError(f"the result came, but cannot be read here: {error!r}"))
    else:
        future.set_result(value)


def error_in(payload: bytes) -> BaseException:
    """Return the exception that a slot sent, with its remote traceback."""
    try:
        wrapped = deserialize(payload)
        return wrapped.get_exception() if isinstance(wrapped, RemoteExceptionWrapper) else TrainingError(repr(wrapped))
    except Exception as error:  # noqa: BLE001 - unpickling runs the exception's own code
        return DeserializationError(f"it failed, but its exception cannot be read here: {error!r}")
