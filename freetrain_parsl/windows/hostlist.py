"""Host lists as Slurm writes them: ``nid[001-004,007],login1``."""

from __future__ import annotations

import re
from itertools import product

__all__ = ["expand_hosts", "natural_order"]

_MOST_HOSTS = 1_000_000

_PART = re.compile(r"(?P<text>[^\[\],]+)|\[(?P<ranges>[0-9,\-]+)\]|(?P<comma>,)")


def expand_hosts(text: str) -> list[str]:
    """List the names of a host list, in its order.

    A name may hold several brackets (``rack[1-2]n[01-16]``); numbers keep their leading zeros.

    Raises
    ------
    ValueError
        It is no host list.
    """
    hosts: list[str] = []
    parts: list[list[str]] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise ValueError(f"{text!r} is no list of nodes")
        position = match.end()
        if match["comma"]:
            hosts += _names(text, parts)
            parts = []
        else:
            parts.append([match["text"]] if match["text"] else _numbers(text, match["ranges"]))
    return hosts + _names(text, parts)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key by which n2 comes before n10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _names(text: str, parts: list[list[str]]) -> list[str]:
    if not parts:
        raise ValueError(f"{text!r} is no list of nodes")
    return ["".join(names) for names in product(*parts)]


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            last = first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < _MOST_HOSTS):
            raise ValueError(f"{text!r} is no list of nodes: range {item!r}")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
