"""The Python environments of driver and nodes: their versions, and whether they are compatible.

Functions are sent as bytecode and objects as pickles, so some differences break a training and others do not:

==============================  ==========================================================================
differs                         consequence
==============================  ==========================================================================
Python, major or minor version  refused: bytecode of one minor version does not run on another
freetrain_parsl                 refused: driver and slots must use the same protocol
parsl                           refused: tasks and results use Parsl's serialization
torch, dill                     a warning: the nodes' versions are used; differing local version labels
                                (``+cpu``, ``+cu126``) cause no warning
==============================  ==========================================================================
"""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Difference", "compare", "describe_environment"]

_PACKAGES = {"freetrain": "freetrain-parsl", "parsl": "parsl", "torch": "torch", "dill": "dill"}
_REFUSED = ("python", "freetrain", "parsl")
_REMEDY = "set `node.python` (in Python: `node_python=`) to an interpreter with the driver's versions"


@dataclass(frozen=True)
class Difference:
    """How a node's environment differs from the driver's.

    Parameters
    ----------
    text
        One line: the node, what differs, the remedy.
    refused
        Whether no training can run there.
    """

    text: str
    refused: bool


def describe_environment() -> dict[str, str]:
    """Return this process's versions of ``python``, ``freetrain``, ``parsl``, ``torch``, ``dill``, and ``executable``.

    Packages that are not installed are omitted.
    """
    found = {"python": platform.python_version(), "executable": sys.executable}
    for name, package in _PACKAGES.items():
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def compare(node: str, theirs: Mapping[str, Any], ours: Mapping[str, str]) -> Difference | None:
    """Compare a node's environment with the driver's; return ``None`` if there is no relevant difference.

    Parameters
    ----------
    node
        Name of the node, for the message.
    theirs, ours
        From `describe_environment`, on the node and in the driver. Entries that either lacks are not compared.
    """
    differing = [
        name
        for name in ("python", *_PACKAGES)
        if name in theirs and name in ours and _essential(name, str(theirs[name])) != _essential(name, ours[name])
    ]
    if not differing:
        return None
    facts = ", ".join(f"{name} {theirs[name]} (driver: {ours[name]})" for name in differing)
    where = f" in {theirs['executable']}" if "executable" in theirs else ""
    refused = any(name in _REFUSED for name in differing)
    consequence = "cannot run trainings of this driver" if refused else "differs from the driver"
    return Difference(f"node {node} {consequence}: it has {facts}{where}; {_REMEDY}", refused)


def _essential(name: str, text: str) -> str:
    """Return the part of a version that is compared."""
    return ".".join(text.split(".")[:2]) if name == "python" else text.partition("+")[0]
