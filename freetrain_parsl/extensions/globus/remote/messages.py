"""What the user's machine and the site say to each other: JSON documents, checked where they arrive."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from freetrain_parsl.campaign.detached import RunStatus
from freetrain_parsl.errors import InvalidInput, RemoteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

__all__ = [
    "FUNCTION",
    "FUNCTION_SOURCE",
    "LOG_BYTES",
    "Versions",
    "check_run_name",
    "checked_answer",
    "field_of",
    "parse_status",
    "plain_text",
]

T = TypeVar("T")

LOG_BYTES = 200_000
"""Most bytes of a log in one answer."""

FUNCTION = "freetrain_remote"
FUNCTION_SOURCE = f"""
def {FUNCTION}(request):
    try:
        from freetrain_parsl.extensions.globus.remote.verbs import answer
    except ImportError as error:
        import sys
        return {{
            "error": f"freetrain-parsl cannot be used in the endpoint's Python {{sys.version.split()[0]}}, "
            f"{{sys.executable}}: {{error}}; install there the version that is installed here",
            "usage": False,
        }}
    return answer(request)
"""
"""The function that is registered with Globus Compute; everything else is installed at the site."""

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def checked_answer(document: Any) -> dict[str, Any]:
    """Return the answer to a call.

    Raises
    ------
    InvalidInput
        The site has refused the request.
    RemoteError
        It has failed, or sent something else.
    """
    if not isinstance(document, dict):
        raise RemoteError("the site sent an unexpected answer; is another version of freetrain-parsl there?")
    if isinstance(error := document.get("error"), str):
        raise (InvalidInput if document.get("usage") else RemoteError)(plain_text(error))
    return document


def parse_status(document: Mapping[str, Any]) -> RunStatus:
    """Read the status of a run from a message.

    Raises
    ------
    RemoteError
        The site sent something else.
    """
    run, state, host, directory, message = (
        field_of(document, name, str) for name in ("run", "state", "host", "directory", "message")
    )
    summary = None if document.get("summary") is None else field_of(document, "summary", dict)
    if summary is not None:
        field_of(summary, "trainings", list)
    return RunStatus(run, state, host, directory, plain_text(message), summary)


def field_of(answer: Mapping[str, Any], name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """Return a field of a site's answer.

    Raises
    ------
    RemoteError
        It is missing, or of another type.
    """
    value = answer.get(name)
    if not isinstance(value, kind):
        raise RemoteError("the site sent an unexpected answer; is another version of freetrain-parsl there?")
    return value


def plain_text(text: object, longest: int = 2000) -> str:
    """Return a site's text as it may be shown on a terminal and stored: no control characters, not too long."""
    return "".join(c if c.isprintable() or c in "\n\t" else " " for c in str(text)[:longest])


def check_run_name(name: object) -> str:
    """Return the name of a run.

    Raises
    ------
    InvalidInput
        It is none.
    """
    if not (isinstance(name, str) and _RUN_NAME.fullmatch(name)):
        raise InvalidInput(f"{str(name)[:80]!r} is not the name of a run, such as digits-1a2b3c4d")
    return name


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
