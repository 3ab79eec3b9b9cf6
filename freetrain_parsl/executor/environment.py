"""The Python environments of driver and nodes: their versions, and whether they are compatible.

Functions are sent as bytecode and objects as pickles, so some differences break a training job and others do not:

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

import logging
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from freetrain_parsl.protocol import journal as record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from freetrain_parsl.protocol.messages import Hello

logger = logging.getLogger(__name__)

__all__ = ["EnvironmentCheck", "compare", "describe_environment"]

_PACKAGES = {"freetrain": "freetrain-parsl", "parsl": "parsl", "torch": "torch", "dill": "dill"}
_REFUSED = ("python", "freetrain", "parsl")
_REMEDY = "set `node.python` (in Python: `node_python=`) to an interpreter with the driver's versions"


def describe_environment() -> dict[str, str]:
    """Return this process's versions of ``python``, ``freetrain``, ``parsl``, ``torch``, ``dill``, and ``executable``.

    Packages that are not installed are omitted.
    """
    found = {"python": platform.python_version(), "executable": sys.executable}
    for name, package in _PACKAGES.items():
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def compare(node: str, theirs: Mapping[str, Any], ours: Mapping[str, str]) -> tuple[str, bool]:
    """Compare a node's environment with the driver's.

    Return one line, with the node, what differs and the remedy, empty if there is no relevant difference; and whether
    no training job can run there. Both are from `describe_environment`; entries that either lacks are not compared.
    """
    differing = [
        name
        for name in ("python", *_PACKAGES)
        if name in theirs and name in ours and _essential(name, str(theirs[name])) != _essential(name, ours[name])
    ]
    if not differing:
        return "", False
    facts = ", ".join(f"{name} {theirs[name]} (driver: {ours[name]})" for name in differing)
    where = f" in {theirs['executable']}" if "executable" in theirs else ""
    refused = any(name in _REFUSED for name in differing)
    consequence = "cannot run training jobs of this driver" if refused else "differs from the driver"
    return f"node {node} {consequence}: it has {facts}{where}; {_REMEDY}", refused


def _essential(name: str, text: str) -> str:
    """Return the part of a version that is compared."""
    return ".".join(text.split(".")[:2]) if name == "python" else text.partition("+")[0]


class EnvironmentCheck:
    """Compares the environments of new slots with the driver's.

    Attributes
    ----------
    any_fits
        Whether any slot so far could run training jobs. If none could, the site's configuration is wrong.
    """

    def __init__(self, write: Callable[[record.Record], None]) -> None:
        self.any_fits = False
        self._write = write
        self._versions = describe_environment()
        self._reported: set[str] = set()

    def refusal(self, hello: Hello) -> str:
        """Return why a slot's node cannot run training jobs; empty if it can."""
        if hello.fault:
            text, refused = f"node {hello.node} cannot run training jobs: {hello.fault}", True
        else:
            text, refused = compare(hello.node, hello.versions, self._versions)
        if text and text not in self._reported:  # once, not for each slot of a node
            self._reported.add(text)
            logger.warning("%s", text)
            self._write(record.EnvironmentDiffers(hello.node, text, refused))
        self.any_fits |= not refused
        return text if refused else ""
