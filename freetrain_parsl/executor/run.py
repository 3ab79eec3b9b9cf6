"""A training's run in a slot: what the driver's messages become for the training, and its reports for the driver.

The main thread is in `Run.perform`; `Run.handle` is called by the channel's thread meanwhile.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import serialize

from freetrain_parsl.errors import PeerLost, StorageUnavailable
from freetrain_parsl.executor.protocol import Message, unpack_training
from freetrain_parsl.executor.rendezvous import ChannelKeyValue
from freetrain_parsl.training.identity import Code
from freetrain_parsl.training.terms import (
    Finished,
    Membership,
    Notice,
    Progress,
    Ready,
    Regroup,
    Regrouped,
    SessionOptions,
    Stranded,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from freetrain_parsl.training.terms import Report

__all__ = ["Run", "serialized_exception"]

# A newcomer comes to the meeting at once, the members when they have done their step or their validation.
_WHILE_OTHERS_TRAIN = timedelta(minutes=30)


class Run:
    """One ``run`` order of the driver.

    Parameters
    ----------
    order
        The message.
    interface
        Network interface for the members; ``None``: torch's choice.
    send
        Sends a message to the driver; from any thread.
    address
        This node's IP address at that interface; ``None``: the members do not check that they reach each other.
    """

    def __init__(
        self, order: Message, *, interface: str | None, send: Callable[[Message], None], address: str | None = None
    ) -> None:
        self.notice = Notice()
        self.number: int = order["run"]
        self._order = order
        self._interface = interface
        self._address = address
        self._send = send
        self._names = {"trainer": order["trainer"], "run": order["run"]}
        self._meeting = timedelta(seconds=order["meeting_timeout"])
        self._lock = threading.Lock()  # of the next three
        self._stores: dict[str, ChannelKeyValue] = {}
        self._memberships: dict[int, Membership] = {}
        self._closed = False
        self._membership: Membership | None = None
        if not order["joining"]:
            self._membership = self._place(order["generation"], order["rank"], order["world_size"])
        self._generation = 0 if self._membership is None else self._membership.generation  # or being formed
        self._is_member = self._membership is not None
        self._is_stranded = False

    @property
    def expendable(self) -> bool:
        """Whether nothing would be lost if this process ended now."""
        return not self._is_member or self._is_stranded or not self.notice.underway.is_set()

    def perform(self) -> Message:
        """Run the training to its end here, and return the message that tells it."""
        from freetrain_parsl.training.fragment import run_fragment

        header: dict[str, Any] = {"outcome": "failed"}
        payload = b""
        try:
            function, args, kwargs = unpack_training(self._order.payload)
            ended = run_fragment(
                function,
                args,
                kwargs,
                options=self._options(),
                membership=self._membership,
                meet=self._meet,
                notice=self.notice,
                report=self._report,
            )
            header["progress"] = asdict(ended.progress)
            if isinstance(ended, Finished):
                header["outcome"] = "finished"
                is_first = self._membership is not None and self._membership.rank == 0
                payload = serialize(ended.value) if is_first else b""
            else:
                header |= {"outcome": "paused", "reason": ended.reason.value}
        except PeerLost as error:
            header = {
                "outcome": "peer_lost",
                "reason": str(error),
                "generation": self._generation,
                "unreachable": error.unreachable,
            }
        except StorageUnavailable as error:  # no fault of the training: it waits
            header = {"outcome": "storage", "reason": str(error), "condition": error.condition}
        except Exception:  # noqa: BLE001 - whatever the user's function raises belongs in the user's future
            header = {"outcome": "failed"}
            payload = serialized_exception()
        return self._message("ended", header, payload)

    def handle(self, message: Message) -> bool:
        """Take a message of the driver; False if it is about another run, or answers a group that this one has left."""
        if message.type == "kv":
            with self._lock:
                store = self._stores.get(message["group"])  # made before it asked anything
            if store is None:
                return False
            store.deliver(message)
        elif message["run"] != self.number:
            return False
        elif message.type == "regroup":
            self._regroup(message)
        elif self._is_member:
            self.notice.pause_requested.set()
        else:
            self.notice.end()
        return True

    def close(self) -> None:
        """Fail all rendezvous: the driver is gone, or the run is over."""
        with self._lock:
            self._closed = True
            stores = list(self._stores.values())
        for store in stores:
            store.close()

    # The channel's thread.

    def _regroup(self, message: Message) -> None:
        membership = None
        if message["rank"] is not None:
            membership = self._place(message["next"], message["rank"], message["world_size"])
            with self._lock:
                self._memberships[membership.generation] = membership
        if message["abort"]:
            with self._lock:
                abandoned = list(self._stores.values())
            for store in abandoned:
                store.close()
        self.notice.order(Regroup(membership, abort=message["abort"]))

    # The main thread.

    def _place(self, generation: int, rank: int, world_size: int) -> Membership:
        is_newcomer = self._order["joining"] and not self._is_member
        return Membership(
            trainer=self._names["trainer"],
            generation=generation,
            rank=rank,
            world_size=world_size,
            meeting=_WHILE_OTHERS_TRAIN if is_newcomer else self._meeting,
            interface=self._interface,
            address=self._address,
        )

    def _options(self) -> SessionOptions:
        order = self._order
        interval = order["checkpoint_interval"]
        code = order.header.get("code")
        return SessionOptions(
            name=order["trainer"],
            checkpoint_root=Path(order["checkpoint_root"]),
            seed=order["seed"],
            checkpoint_interval=None if interval is None else timedelta(seconds=interval),
            mean_time_between_losses=timedelta(seconds=order["mean_time_between_losses"]),
            keep=order["keep"],
            save_margin=timedelta(seconds=order["save_margin"]),
            threads=order["threads"],
            epochs=order["epochs"],
            root_identity=order.header.get("root_identity", ""),
            code=Code(**code) if code else None,
            on_code_change=order.header.get("on_code_change", "refuse"),
            call=order.header.get("call", ""),
        )

    def _meet(self, membership: Membership) -> Store:
        from freetrain_parsl.training.membership import RendezvousStore

        self._generation = membership.generation
        group = f"{membership.trainer}/{membership.generation}"
        store = ChannelKeyValue(group, self._send)
        with self._lock:
            self._stores[group] = store
            if self._closed:
                store.close()
        return RendezvousStore(store)

    def _report(self, report: Report) -> None:
        if isinstance(report, Progress):
            message = self._message("progress", {"progress": asdict(report)})
        elif isinstance(report, Ready):
            message = self._message("ready", {})
        elif isinstance(report, Stranded):
            self._is_stranded = True
            message = self._message("stranded", {"generation": self._generation, **asdict(report)})
        else:
            self._joined(report)
            message = self._message("regrouped", asdict(report))
        self._send(message)

    def _joined(self, report: Regrouped) -> None:
        group = f"{self._names['trainer']}/{report.generation}"
        with self._lock:
            self._membership = self._memberships[report.generation]
            self._memberships = {n: m for n, m in self._memberships.items() if n > report.generation}
            old = [self._stores.pop(name) for name in list(self._stores) if name != group]
        for store in old:
            store.close()
        self._generation = report.generation
        self._is_member, self._is_stranded = True, False

    def _message(self, kind: str, header: dict[str, Any], payload: bytes = b"") -> Message:
        return Message(kind, {**self._names, **header}, payload)


def serialized_exception() -> bytes:
    """Serialise the exception that is being handled, with its traceback."""
    _, value, traceback = sys.exc_info()
    assert value is not None, "only called while an exception is handled"
    try:
        return bytes(serialize(RemoteExceptionWrapper(type(value), value, traceback)))
    except Exception as refusal:  # noqa: BLE001 - any object may refuse to be pickled, in any way
        stand_in = RuntimeError(f"{type(value).__name__}: {value} (itself it cannot be sent: {refusal})")
        return bytes(serialize(RemoteExceptionWrapper(RuntimeError, stand_in, traceback)))
