"""What a code object does, independent of how the compiler has laid it out.

The line numbers of the source decide where the compiler fuses instructions, redirects jumps and copies short blocks.
Here bytecode becomes a graph of nodes with a label and possible successors: jumps are edges, fused instructions are
split. Nodes that no execution can distinguish are merged by partition refinement (Moore's algorithm for deterministic
automata), so that programs that differ only in their layout have the same graph.
"""

from __future__ import annotations

import dis
import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

__all__ = ["NO_EFFECT", "steps_of"]

NO_EFFECT = frozenset({"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN"})
_JUMP = re.compile(r"JUMP_(FORWARD|BACKWARD|BACKWARD_NO_INTERRUPT|ABSOLUTE)")
_TEST = re.compile(r"(POP_)?JUMP_(?:FORWARD_|BACKWARD_)?IF_(TRUE|FALSE|NONE|NOT_NONE)(?:_OR_POP)?")
_TESTS = {
    "TRUE": ("is true", True),
    "FALSE": ("is true", False),
    "NONE": ("is None", True),
    "NOT_NONE": ("is None", False),
}
_FUSED = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_LAST = {"RETURN_VALUE", "RAISE_VARARGS", "RERAISE"}
_LAYOUT_NAMES = {"__firstlineno__", "__static_attributes__"}  # which Python 3.13 stores in classes
_NOWHERE = -1


@dataclass
class _Node:
    """One step.

    Attributes
    ----------
    label
        What it does; empty: nothing.
    successors
        Numbers of the nodes that may follow. Of a test, the first follows if it holds, the second if it does not.
    """

    label: str
    successors: list[int]


def steps_of(code: types.CodeType, constant: Callable[[object], str]) -> list[str]:
    """Return a description of what a code object does that is the same for all layouts of its source.

    Parameters
    ----------
    code
        The code object.
    constant
        Describes a constant; nested code objects are constants.
    """
    nodes = _graph(code, constant)
    for node in nodes:
        node.successors = [_effective(nodes, node, outcome) for outcome in range(len(node.successors))]
    classes = _refined(nodes)
    steps: dict[int, _Node] = {}  # class -> one of its nodes, depth first from the entry
    waiting = [_past_no_effect(nodes, 0)] if nodes else []
    while waiting:
        number = waiting.pop()
        if number != _NOWHERE and classes[number] not in steps:
            steps[classes[number]] = nodes[number]
            waiting.extend(reversed(nodes[number].successors))
    order = {found: place for place, found in enumerate(steps)}
    return [
        f"{node.label} {[_NOWHERE if n == _NOWHERE else order[classes[n]] for n in node.successors]}"
        for node in steps.values()
    ]


def _graph(code: types.CodeType, constant: Callable[[object], str]) -> list[_Node]:
    """Return the nodes of a code object, in the order of its instructions."""
    instructions = _without_layout_data(list(dis.get_instructions(code)))
    handlers = getattr(dis.Bytecode(code), "exception_entries", ())  # from Python 3.11 on
    begins = list(itertools.accumulate(map(_size, instructions), initial=0))
    place = {one.offset: begin for one, begin in zip(instructions, begins, strict=False)}
    nodes: list[_Node] = []
    for one, begin, end in zip(instructions, begins, begins[1:], strict=False):
        following = end if end < begins[-1] else _NOWHERE
        target = place[one.argval] if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs else _NOWHERE
        made = _nodes_of(one, begin, following, target, constant)
        handler = next((entry for entry in handlers if entry.start <= one.offset < entry.end), None)
        for node in made:
            if handler is not None and node.label:
                node.label += f" except {handler.depth} {handler.lasti}"
                node.successors.append(place[handler.target])
        nodes += made
    return nodes


def _size(one: dis.Instruction) -> int:
    """Return the number of nodes that `_nodes_of` makes of an instruction."""
    if _TEST.fullmatch(one.opname):
        return 3
    return 2 if one.opname in _FUSED or one.opname == "RETURN_CONST" else 1


def _nodes_of(
    one: dis.Instruction, begin: int, following: int, target: int, constant: Callable[[object], str]
) -> list[_Node]:
    """Return the nodes of an instruction, of which the first has the number `begin`."""
    name = one.opname
    if name in NO_EFFECT:
        return [_Node("", [following])]
    if _JUMP.fullmatch(name):
        return [_Node("", [target])]
    if test := _TEST.fullmatch(name):
        label, jumps_if = _TESTS[test[2]]
        jump, fall = begin + 1 if test[1] else target, begin + 2
        return [
            _Node(label, [jump, fall] if jumps_if else [fall, jump]),
            _Node("POP_TOP", [target]),
            _Node("POP_TOP", [following]),
        ]
    if name in _FUSED:
        (first, second), (one_value, other_value) = _FUSED[name], one.argval
        return [_Node(f"{first} {one_value!r}", [begin + 1]), _Node(f"{second} {other_value!r}", [following])]
    if name == "RETURN_CONST":
        return [_Node(f"LOAD_CONST {constant(one.argval)}", [begin + 1]), _Node("RETURN_VALUE", [])]
    if target != _NOWHERE:
        return [_Node(name, [following, target])]
    if name in _LAST:
        return [_Node(name if one.arg is None else f"{name} {one.arg}", [])]
    if name == "POP_TOP":
        return [_Node(name, [following])]
    argument = constant(one.argval) if one.opcode in dis.hasconst else repr(one.argval)
    return [_Node(f"{name.replace('_BORROW', '')} {argument}", [following])]


def _without_layout_data(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    """Leave out what stores line numbers and the like in a class."""
    left_out = {
        number - back
        for number, one in enumerate(instructions)
        if one.opname == "STORE_NAME" and one.argval in _LAYOUT_NAMES
        for back in (0, 1)
    }
    return [one for number, one in enumerate(instructions) if number not in left_out]


def _past_no_effect(nodes: Sequence[_Node], number: int) -> int:
    """Return the first node from this one on that does something."""
    for _ in nodes:
        if number == _NOWHERE or nodes[number].label:
            return number
        (number,) = nodes[number].successors
    return _NOWHERE  # an empty loop


def _effective(nodes: Sequence[_Node], node: _Node, outcome: int) -> int:
    """Return a successor past nodes without effect, and past tests of the same value, whose outcome is known."""
    number = _past_no_effect(nodes, node.successors[outcome])
    for _ in nodes:
        if number == _NOWHERE or not node.label.startswith("is ") or outcome > 1 or nodes[number].label != node.label:
            break
        number = _past_no_effect(nodes, nodes[number].successors[outcome])
    return number


def _refined(nodes: Sequence[_Node]) -> list[int]:
    """Return a class for each node: nodes of one class have equal labels and successors of equal classes."""
    numbers: dict[object, int] = {}
    classes = [numbers.setdefault(node.label, len(numbers)) for node in nodes]
    while True:
        finer: dict[object, int] = {}
        next_classes = [
            finer.setdefault((own, *(s if s == _NOWHERE else classes[s] for s in node.successors)), len(finer))
            for own, node in zip(classes, nodes, strict=True)
        ]
        if len(finer) == len(numbers):
            return classes
        classes, numbers = next_classes, finer
