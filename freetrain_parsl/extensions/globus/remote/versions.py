"""Pure: which versions of the software two hosts have, and whether a campaign of one can run on the other."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = ["Versions"]

_MISSING = "none"


@dataclass(frozen=True)
class Versions:
    """Versions of what a campaign depends on.

    Parameters
    ----------
    python, freetrain_parsl, torch
        As the packages state them; ``none`` if it is not installed.
    """

    python: str
    freetrain_parsl: str
    torch: str

    @classmethod
    def installed(cls) -> Self:
        """Return those of this process, without importing the packages."""
        return cls(platform.python_version(), _installed("freetrain-parsl"), _installed("torch"))

    @classmethod
    def parse(cls, document: Mapping[str, object]) -> Self:
        """Read them from a message; what is absent is ``none``."""
        return cls(*(str(document.get(name, _MISSING))[:80] for name in ("python", "freetrain_parsl", "torch")))

    def as_json(self) -> dict[str, str]:
        """Describe them for a message."""
        return asdict(self)

    def mismatch(self, other: Versions) -> str:
        """Describe in one line how another host's versions differ where it matters; empty if they do not.

        Python and torch must agree in major and minor version, for the meaning of code and checkpoints;
        freetrain-parsl completely, as both hosts take part in one protocol.
        """
        pairs = (
            ("Python", _minor(self.python), _minor(other.python)),
            ("freetrain-parsl", self.freetrain_parsl, other.freetrain_parsl),
            ("torch", _minor(self.torch), _minor(other.torch)),
        )
        return "; ".join(f"{name} is {there} there and {here} here" for name, here, there in pairs if here != there)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _MISSING


def _minor(text: str) -> str:
    return ".".join(text.partition("+")[0].split(".")[:2])
