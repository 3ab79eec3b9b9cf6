"""Nodes of embedded clusters whose programs are forked from one process that has imported everything.

All nodes of an embedded cluster are on one machine, so one server (`server`) can import Parsl and torch for all of
them, and for several clusters. The executor starts the program of a node through `client`, which asks the server for a
copy, and starts the program as on any other node if it gets none: providers of embedded clusters say so where the
environment has the variables of `owner`.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ADDRESS", "CLIENT"]

ADDRESS: Final = "FREETRAIN_WARM_START"
"""Environment variable: path of the server's socket."""

CLIENT: Final = "freetrain_parsl.extensions.demo.warm_start.client"
"""Module through which the program of a node is started."""
