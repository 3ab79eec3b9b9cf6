"""Texts of user code, of commands and of others' files, for terminals, files and databases."""

from __future__ import annotations

import re
from typing import Final

__all__ = [
    "LONGEST_LINE",
    "coloured",
    "cut",
    "printable",
    "printable_lines",
    "shortened",
    "storable",
    "text_of",
    "with_colours_only",
]

_SEQUENCE = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # a control sequence, perhaps cut off
# Texts for the terminal itself, such as OSC 52, which sets the clipboard:
_STRING = r"(?:\x1b[]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\|\x9c)"
_ESCAPE = re.compile(rf"{_STRING}|{_SEQUENCE}|\x1b[ -/]*[0-~]?")
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_NOT_A_COLOUR = re.compile(rf"{_COLOUR.pattern}|{_ESCAPE.pattern}|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RESET = "\x1b[0m"
LONGEST_LINE: Final = 100_000
"""Maximum length of a line that is shown; longer than any path and any list of nodes."""

_LONGEST_NAME = 120
_LONGEST = 20_000  # characters of an exception's text


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
    """Return a text with characters that UTF-8 cannot encode escaped, as files and databases require."""
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    """Return a text as one line that does nothing to a terminal.

    Escape sequences are left out. A space replaces each other character that is not seen: control characters, ends of
    lines, and those that turn or join what is around them, such as U+202E. What UTF-8 cannot encode is escaped.
    """
    if text.isprintable():
        return text
    shown = _ESCAPE.sub("", storable(text))
    return "".join(character if character.isprintable() else " " for character in shown)


def printable_lines(text: str) -> str:
    """Return a text with each line as by `printable`, but with tabs, and of limited length."""
    if text.isprintable() and len(text) <= LONGEST_LINE:
        return text
    return "\n".join(_with_tabs(line) for line in text.split("\n"))


def coloured(text: str) -> str:
    """Return a text as `printable` does, but with its tabs and its colours (SGR), which end with it."""
    if text.isprintable():
        return text
    pieces = _COLOUR.split(text)
    pieces[::2] = map(_with_tabs, pieces[::2])
    return "".join(pieces) + (_RESET if len(pieces) > 1 and pieces[-2:] != [_RESET, ""] else "")


def with_colours_only(text: str) -> str:
    """Return a text for a file that people look at: without control characters but for tabs, ends of lines and colours.

    What UTF-8 cannot encode is escaped.
    """
    return storable(_NOT_A_COLOUR.sub(lambda found: found[1] or "", text))


def shortened(text: str, most: int = _LONGEST_NAME) -> str:
    """Return a text, such as a name, as `printable` does, cut to this number of characters."""
    shown = printable(text[: 2 * most + _LONGEST_NAME])  # a text may be large, and half of it escapes
    return shown if len(shown) <= most and len(text) <= 2 * most + _LONGEST_NAME else f"{shown[: most - 1]}…"


def _with_tabs(line: str) -> str:
    return "\t".join(shortened(part, LONGEST_LINE) for part in line.split("\t"))
