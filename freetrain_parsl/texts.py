"""Texts of user code and of commands, for terminals, files and databases."""

from __future__ import annotations

import re

__all__ = ["printable", "storable", "text_of"]

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")  # of terminals


def text_of(error: BaseException) -> str:
    """Return an exception's text; what UTF-8 cannot encode, such as the bytes of a file name, is escaped."""
    try:
        return storable(str(error))
    except BaseException as failure:  # noqa: BLE001 - of the user's class, which may even call sys.exit
        return f"(its text cannot be shown: {type(failure).__name__})"


def storable(text: str) -> str:
    """Return a text with what UTF-8 cannot encode escaped: neither files nor databases take it."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """Return a text as one line without escape sequences and control characters; see also `storable`."""
    shown = _ESCAPE.sub("", storable(text))
    return "".join(character if character.isprintable() else " " for character in shown)
