"""Slurm host lists: ``nid[001-004,007],login1``."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

from freetrain_parsl.places import lane_of, lanes_by_node

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["compress_hosts", "expand_hosts", "natural_order", "show_hosts", "show_units"]

_MOST_HOSTS = 1_000_000
_NUMBER = re.compile(r"[0-9]{1,40}")

_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)", re.DOTALL)
_PART = re.compile(r"(?P<text>[^\[\],]+)|\[(?P<ranges>[0-9,\-]+)\]|(?P<comma>,)")


def expand_hosts(text: str) -> list[str]:
    """Expand a host list to names, in its order.

    A name may hold several brackets (``rack[1-2]n[01-16]``); numbers keep their leading zeros.

    Raises
    ------
    ValueError
        It is not a host list.
    """
    hosts: list[str] = []
    parts: list[list[str]] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise ValueError(f"{text[:80]!r} is not a list of nodes")
        position = match.end()
        if match["comma"]:
            hosts += _names(text, parts, len(hosts))
            parts = []
        else:
            parts.append([match["text"]] if match["text"] else _numbers(text, match["ranges"]))
    return hosts + _names(text, parts, len(hosts))


def compress_hosts(names: Iterable[str]) -> str:
    """Compress names to a host list, with ranges for the last number: ``nid[001-004,007],login1``.

    The inverse of `expand_hosts` except for order and duplicates: names are unique and in natural order.

    Raises
    ------
    ValueError
        A name is empty or contains a comma or a bracket.
    """
    families: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(set(names), key=lambda name: (natural_order(name), name)):
        if not _fits(name):
            raise ValueError(f"{name!r} is not a node name")
        match = _LAST_NUMBER.fullmatch(name)
        if match is None:
            families[name, ""] = []
        else:
            families[f"{match[1]}[", f"]{match[3]}"].append(match[2])
    return ",".join(_brief(before, numbers, after) for (before, after), numbers in families.items())


def show_hosts(names: Iterable[str], slots_per_node: int | None = None) -> str:
    """Write names for people: a host list, then those that it cannot contain, such as vnodes of PBS (``host[0]``).

    Slots of nodes that jobs share are written by node, ``n0/0-2``; a node with all of its `slots_per_node`, if that is
    known, by its name.
    """
    unique = set(names)
    slots = lanes_by_node([name for name in unique if lane_of(name) is not None])
    if slots:
        unique = {name for name in unique if lane_of(name) is None}
        unique |= {node for node, runs in slots.items() if runs == [(0, slots_per_node)]}
        nodes: defaultdict[str, list[str]] = defaultdict(list)  # lanes -> nodes
        for node in sorted(slots.keys() - unique, key=natural_order):
            lanes = (str(first) if number == 1 else f"{first}-{first + number - 1}" for first, number in slots[node])
            nodes[",".join(lanes)].append(node)
        whole = [show_hosts(unique)] if unique else []
        return ",".join([*whole, *(f"{show_hosts(those)}/{lanes}" for lanes, those in nodes.items())])
    others = {name for name in unique if not _fits(name)}
    shown = compress_hosts(unique - others)
    return ",".join(filter(None, [shown, *sorted(others, key=natural_order)]))


def show_units(units: Sequence[str], slots_per_node: int | None = None) -> str:
    """Write a job's units: ``n0, n1``; of nodes that jobs share ``n0/0-1 (2 accelerators)``; see `show_hosts`."""
    slots = sum(lane_of(unit) is not None for unit in units)
    accelerators = f"{slots:,} accelerator{'' if slots == 1 else 's'}"
    return f"{show_hosts(units, slots_per_node)} ({accelerators})" if slots else ", ".join(units)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which n2 comes before n10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _fits(name: str) -> bool:
    """Return whether a host list can contain a name."""
    return bool(name) and set(name).isdisjoint("[],")


def _brief(before: str, numbers: list[str], after: str) -> str:
    """Format names with a common prefix and suffix, which carry the brackets, unneeded for a single number."""
    ranges: list[list[str]] = []
    for number in numbers:
        first, last = ranges[-1] if ranges else ("", "")
        if first and f"{int(last) + 1:0{len(first)}d}" == number and int(last) - int(first) < _MOST_HOSTS - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(numbers) == 1:
        return f"{before[:-1]}{numbers[0]}{after[1:]}"
    return before + ",".join(first if first == last else f"{first}-{last}" for first, last in ranges) + after


def _names(text: str, parts: list[list[str]], before: int) -> list[str]:
    """Combine the parts of one item, which follows `before` names."""
    if not parts:
        raise ValueError(f"{text[:80]!r} is not a list of nodes")
    if before + math.prod(map(len, parts)) > _MOST_HOSTS:
        raise ValueError(f"{text[:80]!r} is a list of more than {_MOST_HOSTS:,} nodes")
    return ["".join(names) for names in product(*parts)]


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            last = first
        if not (_NUMBER.fullmatch(first) and _NUMBER.fullmatch(last) and int(first) <= int(last)):
            raise ValueError(f"{text[:80]!r} is not a list of nodes: range {item[:80]!r}")
        if len(numbers) + int(last) - int(first) >= _MOST_HOSTS:
            raise ValueError(f"{text[:80]!r} is a list of more than {_MOST_HOSTS:,} nodes")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
