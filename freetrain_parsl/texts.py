"""Texts of user code and of commands, for terminals, files and databases."""

from __future__ import annotations

import re

__all__ = ["cut", "printable", "storable", "text_of"]

_LONGEST = 20_000  # characters of an exception's text

_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")  # of terminals


def text_of(error: BaseException, most: int = _LONGEST) -> str:
    """Return an exception's text; what UTF-8 cannot encode, such as the bytes of a file name, is escaped.

    The middle of a text of more than `most` characters is left out: it may have gigabytes.
    """
    try:
        return storable(cut(str(error), most))
    except BaseException as failure:  # noqa: BLE001 - of the user's class, which may even call sys.exit
        return f"(its text cannot be shown: {type(failure).__name__})"


def cut(text: str, most: int) -> str:
    """Return a text, without its middle if it has more than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … [cut: {len(text):,} characters] … {text[len(text) - most // 2 :]}"


def storable(text: str) -> str:
    """Return a text with what UTF-8 cannot encode escaped: neither files nor databases take it."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """Return a text as one line without escape sequences and control characters; see also `storable`."""
    shown = _ESCAPE.sub("", storable(text))
    return "".join(character if character.isprintable() else " " for character in shown)
