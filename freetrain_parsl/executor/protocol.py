"""What driver and slots say to each other: a JSON header frame and, where code or values travel, one payload frame.

The frames go over CurveZMQ with HTEX's own certificates, so both ends are known to each other. Payloads are Parsl's
serialisation, the same trust as HTEX's own task and result messages; nothing else is ever unpickled.

====================  ================================================================================
slot -> driver
====================  ================================================================================
``hello``             I exist: token, node, block, pid; ``versions`` (optional): of this slot's Python and packages,
                      see `executor.environment`
``beat``              I am alive (answered by ``beat``); ``run``, ``task``: numbers of what I have to do, or null;
                      ``waited``: if I train, seconds for which I have done nothing but wait for the other members
``notice``            my node will be taken in ``closes_in`` seconds (a signal of the batch system); ``gone``: I
                      have nothing to save and leave at once
``progress``          how far the training is (first rank only)
``ready``             I have everything but the training's state and wait for ``regroup`` (newcomers only)
``stranded``          my group lost a member (``reason``): I have left it and wait for ``regroup``; ``unreachable``:
                      pairs of ranks that do not reach each other over the network
``regrouped``         I go on in group ``generation``; ``paused``: seconds without progress, ``transferred``: of
                      these, seconds in which the state was passed on
``ended``             the run is over for me; payload: value or exception
``task_ended``        an ordinary task is over; payload: value or exception
``kv``                rendezvous: set, get, add, check, delete on the key-value store of ``group``
``resumed``           I have connected anew (answered by ``resumed``)
``probe``             do you hear me? (answered by ``probe``; needs no ``hello``)
====================  ================================================================================

====================  ================================================================================
driver -> slot
====================  ================================================================================
``welcome``           you are known; ``closes_in`` seconds left on your node, or null
``beat``              so am I
``run``               run a training: ``run`` (names this order: all that either side says about it repeats it),
                      trainer, options; payload: the function. As a member of a new group: generation, rank,
                      world_size; or ``joining``: as a newcomer to a group that trains already
``regroup``           go on, in place, in group ``next`` as ``rank`` of ``world_size``, or leave if ``rank`` is null;
                      ``abort``: a member of your group is lost, do not wait for the others' agreement
``pause``             stop the run at the next step boundary, after a checkpoint; a newcomer just leaves
``task``              run an ordinary task; payload: the function
``kv``                answer to ``kv``
``exit``              stop training if you do, then end your process; with ``now``: at once; with ``node``: and the
                      node's worker pool
``resumed``           answer to ``resumed``
``probe``             answer to ``probe``
====================  ================================================================================

Any message but ``beat``, ``resumed`` and ``probe`` may carry its number ``n``; ``beat`` and ``resumed`` carry in
``seen`` how far the other end's messages have come: see `freetrain_parsl.executor.delivery`. The fields of every header
are in `freetrain_parsl.executor.headers`.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, field
from pickle import _Pickler as StockPickler  # dill's is made of it
from types import FunctionType
from typing import TYPE_CHECKING, Any

import dill
from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import deserialize
from parsl.serialize.errors import DeserializationError

from freetrain_parsl.errors import FreeTrainError, TrainingError
from freetrain_parsl.executor.headers import fault_in, is_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from freetrain_parsl.executor.headers import Fields

Header = dict[str, Any]

_LONGEST_HEADER = 1 << 20  # bytes


class ProtocolError(FreeTrainError):
    """A frame that is not of this protocol."""


@dataclass(frozen=True)
class Message:
    """One message; `type` is one of the words in the tables above."""

    type: str
    header: Header = field(default_factory=dict)
    payload: bytes = b""

    def __getitem__(self, key: str) -> Any:
        return self.header[key]

    def frames(self) -> list[bytes]:
        """Encode."""
        return [json.dumps({"type": self.type, **self.header}).encode(), self.payload]

    @classmethod
    def of_frames(cls, frames: list[bytes]) -> Message:
        """Decode.

        Raises
        ------
        ProtocolError
            The frames are not a header and a payload.
        """
        try:
            head, payload = frames
            header = json.loads(head[:_LONGEST_HEADER])
            kind = header.pop("type")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ProtocolError(f"{len(frames)} frames that are no message: {str(error)[:200]}") from None
        if not is_name(kind):
            raise ProtocolError("a message whose type is not a word")
        return cls(kind, header, payload)

    def check(self, known: Mapping[str, Fields]) -> None:
        """Check that it is one of the `known` messages: `headers.TO_DRIVER` or `headers.TO_SLOT`.

        Raises
        ------
        ProtocolError
            Its type is not known, or a field of its header is missing or cannot be used.
        """
        if self.type not in known:
            raise ProtocolError(f"a message of the unknown type {self.type[:80]!r}")
        if (fault := fault_in(self.header, known[self.type])) is not None:
            raise ProtocolError(f"a {self.type!r} message that cannot be used: {fault}")


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
