"""Nodes of embedded clusters whose programs are forked from one process that has imported everything.

All nodes of an embedded cluster are on one machine, so one server (`server`) can import Parsl and torch for all of
them, and for several clusters. Where the environment names one, the program of a node asks it for a copy (`client`),
and starts as on any other node if it gets none.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ADDRESS"]

ADDRESS: Final = "FREETRAIN_WARM_START"
"""Environment variable: path of the server's socket."""
