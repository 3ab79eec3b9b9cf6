"""Checks of settings that users pass in Python; errors are one line: the setting, its limit and its value."""

from __future__ import annotations

import re
from datetime import timedelta

from freetrain_parsl.errors import InvalidSettings

__all__ = ["check_count", "check_duration", "check_kind_name", "check_speed"]

_ZERO = timedelta(0)
_MOST_SPEED = 1e6  # relative to other nodes; curves of larger ratios exceed what solvers compute
_KIND = r"[A-Za-z][A-Za-z0-9_-]{0,31}"


def check_duration(setting: str, value: object, *, least: timedelta | None = None) -> None:
    """Check that a value is a `timedelta` of at least `least`, by default longer than zero.

    Parameters
    ----------
    setting
        Its name in the message.

    Raises
    ------
    InvalidSettings
        It is not.
    """
    if not isinstance(value, timedelta):
        number = isinstance(value, int | float)
        hint = f"; in seconds: timedelta(seconds={value})" if number else ""
        raise InvalidSettings(f"{setting} must be a timedelta, got {value!r}{hint}")
    if value <= _ZERO if least is None else value < least:
        limit = "longer than zero" if least is None else f"at least {least.total_seconds():g} s"
        raise InvalidSettings(f"{setting} must be {limit}, got {value.total_seconds():g} s")


def check_count(setting: str, value: object, *, least: int = 1, most: int | None = None) -> None:
    """Check that a value is a whole number of at least `least`, and at most `most`.

    Parameters
    ----------
    setting
        Its name in the message.

    Raises
    ------
    InvalidSettings
        It is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidSettings(f"{setting} must be a whole number of at least {least}, got {value!r}")
    if most is not None and value > most:
        raise InvalidSettings(f"{setting} must be at most {most:,}")


def check_speed(setting: str, speed: float) -> None:
    """Check that the nodes of a kind can have this speed, relative to other kinds.

    Parameters
    ----------
    setting
        Its name in the message.

    Raises
    ------
    InvalidSettings
        It is not positive, or is extreme.
    """
    if not 1 / _MOST_SPEED <= speed <= _MOST_SPEED:
        raise InvalidSettings(f"{setting} must be a number from 1e-6 to 1e6, got {speed:g}")


def check_kind_name(name: str) -> None:
    """Check that a kind of node can have this name.

    Raises
    ------
    InvalidSettings
        It is not a word of letters, digits, ``_`` and ``-`` that begins with a letter.
    """
    if not re.fullmatch(_KIND, name):
        raise InvalidSettings(
            f"a kind of node is named by 1 to 32 letters, digits, '_' or '-', the first a letter, got {name[:40]!r}"
        )
