"""Texts of the user's code, such as exceptions and results, for terminals."""

from __future__ import annotations

from rich.text import Text

from freetrain_parsl.errors import storable

__all__ = ["plain"]


def plain(text: str) -> str:
    """Return a text as one line without colours and control characters; what UTF-8 cannot encode is escaped."""
    shown = Text.from_ansi(storable(text)).plain
    return "".join(character if character.isprintable() else " " for character in shown)
