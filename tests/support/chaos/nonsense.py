"""Messages of peers that disappear at once: a driver must not be disturbed by any of them."""

from __future__ import annotations

from freetrain_parsl.protocol.codec import Envelope, encode
from freetrain_parsl.protocol.messages import Hello, Probe, SlotHeartbeat

__all__ = ["NONSENSE"]

NONSENSE: tuple[tuple[str, list[bytes]], ...] = (
    ("a probe", encode(Envelope(Probe(1)))),
    ("a hello of no block", encode(Envelope(Hello("x", "n0", "no", 1)))),
    ("a hello without fields", [b'{"v": 2, "type": "hello"}', b""]),
    ("a beat of a stranger", encode(Envelope(SlotHeartbeat(waited=1.0)))),
    ("no JSON", [b"\xff\xfe", b""]),
    ("too many frames", [b"{}", b"", b"", b""]),
)
"""Name -> frames."""
