"""The user's code: which code is theirs, and what the source of a function says about a variable.

Where it is assigned, whether a round of the loop needs the value that the last one left, and what it reaches.
"""

from __future__ import annotations

import ast
import linecache
import re
import site
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from freetrain_parsl.location import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.extensions.checking.records import Frame

__all__ = [
    "Source",
    "Use",
    "Variable",
    "is_users_file",
    "is_users_type",
    "last_assignment",
    "last_assignment_of_global",
    "line_of",
]

_LOSS, _RATE = "the loss", "the learning rate"
_MADE, _LEFT, _LOG, _RESULT = "whether a step is made", "when the loop is left", "session.log", "the returned value"
_ORDER = (_LOSS, _RATE, _MADE, _LEFT, _LOG, _RESULT)
_RATE_NAMES = re.compile(r"\blr\b|lr_|_lr\b|param_groups|learning_rate")
_NO_OWNERS = {"session", "self", "torch", "F", "math", "np", "random"}  # a call on them keeps nothing of its arguments
_ROUNDS = 8  # of following a value through assignments, without regard to their order
_COUNTING = ("enumerate", "zip")
_APPS = PACKAGE / "apps"  # the example apps are installed there, but are written as users write theirs


@dataclass(frozen=True)
class Use:
    """Something that a variable reaches, and the line."""

    what: str
    line: int


@dataclass
class Variable:
    """A variable of a function."""

    line: int = 0  # of its last assignment, in the loop if there is one; 0 if it is never assigned
    initial: str = ""  # the expression that it is given before the loop; empty if there is none
    in_loop: bool = False  # whether a loop assigns it
    carried: bool = False  # whether a round of a loop may read what an earlier round has left
    counts: bool = False  # whether it counts batches, as the target of ``for i, … in enumerate(loader)``


@lru_cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def line_of(where: str) -> str:
    """Return the text of ``file:line``; empty if it cannot be read."""
    file, _, number = where.rpartition(":")
    return linecache.getline(file, int(number)).strip() if number.isdigit() else ""


class Source:
    """The source of one function of the user."""

    def __init__(self, frame: Frame) -> None:
        name = frame.name.rpartition(".")[2]
        self._node: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        for node in ast.walk(_tree(frame.file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first == frame.line:
                    self._node = node

    @property
    def known(self) -> bool:
        """Whether the source was found."""
        return self._node is not None

    def look_up(self, name: str) -> Variable:
        """Return what the source says about a variable."""
        found = Variable()
        if self._node is None:
            return found
        loops = [node for node in ast.walk(self._node) if isinstance(node, (ast.For, ast.While))]
        in_loops = {id(each) for loop in loops for each in ast.walk(loop)}
        lines: dict[bool, list[int]] = {True: [], False: []}  # inside loops, outside
        for node in ast.walk(self._node):
            if isinstance(node, (ast.stmt, ast.expr)) and name in _written(node):
                inside = id(node) in in_loops
                lines[inside].append(node.lineno)
                if not inside and name in _assigned_plainly(node):
                    found.initial = _value_for(name, node)
        found.in_loop = bool(lines[True])
        found.line = max(lines[True] or lines[False], default=0)
        for loop in loops:
            targets = set(_names(loop.target)) if isinstance(loop, ast.For) else set()
            exposed, _ = _exposed(loop.body, targets)
            if name in exposed and any(name in _written(node) for node in ast.walk(loop)):
                found.carried = True
            if isinstance(loop, ast.For) and name in targets and _called(loop.iter) in _COUNTING and _trains(loop):
                found.counts, found.line = True, loop.lineno
        return found

    def uses(self, name: str) -> list[Use]:
        """Return what a variable reaches, through any assignments."""
        return [] if self._node is None else _Flow(self._node, name).follow()


@dataclass
class _Flow:
    """Follows a value through a function."""

    node: ast.AST
    name: str
    reached: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tainted = {self.name}

    def follow(self) -> list[Use]:
        for _ in range(_ROUNDS):
            before = len(self.tainted)
            for node in ast.walk(self.node):
                self._look_at(node)
            if len(self.tainted) == before:
                break
        return [Use(what, self.reached[what]) for what in _ORDER if what in self.reached]

    def _look_at(self, node: ast.AST) -> None:
        match node:
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr():
                if node.value is not None and self.tainted & _reads(node.value):
                    self._assigned(node)
            case ast.If() | ast.While():
                if self.tainted & _reads(node.test):
                    self._decided(node)
            case ast.For():
                if self.tainted & _reads(node.iter):
                    self.tainted |= set(_names(node.target))
            case ast.Call():
                self._called(node)
            case ast.Return():
                if node.value is not None and self.tainted & _reads(node.value):
                    self.reached[_RESULT] = node.lineno

    def _assigned(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if _RATE_NAMES.search(ast.unparse(target)):
                self.reached[_RATE] = node.lineno
            self.tainted |= {*_names(target), *_bases(target)}

    def _decided(self, node: ast.If | ast.While) -> None:
        for each in ast.walk(node):
            if isinstance(each, (ast.Break, ast.Return, ast.Continue)):
                self.reached[_LEFT] = node.lineno
            elif isinstance(each, ast.Call) and getattr(each.func, "attr", "") == "step":
                self.reached[_MADE] = node.lineno
            if each is not node:
                self.tainted |= _written(each)

    def _called(self, node: ast.Call) -> None:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not (isinstance(node.func, ast.Attribute) and any(self.tainted & _reads(each) for each in given)):
            return
        owner = ast.unparse(node.func.value)
        of_session = not re.search(r"sched|optim|tracker|writer", owner)
        if node.func.attr in ("step", "backward") and of_session:
            self.reached[_LOSS] = node.lineno
        elif node.func.attr == "log" and "session" in owner:
            self.reached[_LOG] = node.lineno
        else:
            self.tainted |= _bases(node.func) - _NO_OWNERS


def last_assignment(files: Iterable[str], attribute: str, bases: Iterable[str], owner: str) -> str:
    """Return ``file:line`` of the last assignment to an attribute of one of these variables; empty if there is none.

    Those in the class `owner` count first.
    """
    found = {True: "", False: ""}
    for file in sorted(set(files)):
        tree = _tree(file)
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == owner]
        inside = {id(each) for node in classes for each in ast.walk(node)}
        for node in ast.walk(tree):
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and target.attr == attribute and _bases(target) <= set(bases):
                    found[id(node) in inside] = f"{file}:{target.lineno}"
    return found[True] or found[False]


def last_assignment_of_global(files: Iterable[str], name: str) -> str:
    """Return ``file:line`` of the last assignment to a global, or to its content, in a function."""
    found = ""
    for file in sorted(set(files)):
        for function in ast.walk(_tree(file)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    if isinstance(node, ast.stmt) and name in _written(node):
                        found = f"{file}:{node.lineno}"
    return found


def _trains(loop: ast.For) -> bool:
    calls = (node for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(getattr(call.func, "attr", "") in ("step", "backward", "train_step") for call in calls)


def _called(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _targets(node: ast.AST) -> Sequence[ast.expr]:
    match node:
        case ast.Assign():
            return node.targets
        case ast.AugAssign() | ast.AnnAssign() | ast.NamedExpr() | ast.For():
            return [node.target]
        case _:
            return []


def _names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _bases(target: ast.AST) -> set[str]:
    """Return the variable whose attribute or item this is."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return {target.id} if isinstance(target, ast.Name) else set()


def _written(node: ast.AST) -> set[str]:
    """Return the variables that a node assigns, or whose content it assigns."""
    targets = _targets(node)
    if isinstance(node, ast.For):
        return set(_names(node.target))
    return {name for target in targets for name in (*_names(target), *_bases(target))}


def _assigned_plainly(node: ast.AST) -> set[str]:
    """Return the variables that a statement gives a new value, whatever they had before."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return set()
    return {name for target in _targets(node) for name in _names(target)}


def _value_for(name: str, node: ast.AST) -> str:
    """Return the expression that an assignment gives a variable, also in ``best, bad = 1e9, 0``."""
    assert isinstance(node, (ast.Assign, ast.AnnAssign)), "it assigns plainly"
    if node.value is None:
        return ""
    for target in _targets(node):
        if isinstance(target, ast.Name) and target.id == name:
            return ast.unparse(node.value)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for part, value in zip(target.elts, node.value.elts, strict=False):
                if isinstance(part, ast.Name) and part.id == name:
                    return ast.unparse(value)
    return ""


def _reads(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def _exposed(body: Sequence[ast.stmt], defined: set[str]) -> tuple[set[str], set[str]]:
    """Return the names that statements read before they are certainly assigned, and those certainly assigned."""
    exposed: set[str] = set()
    defined = set(defined)
    for node in body:
        match node:
            case ast.For() | ast.While():
                exposed |= _reads(node.iter if isinstance(node, ast.For) else node.test) - defined
                targets = _names(node.target) if isinstance(node, ast.For) else ()
                exposed |= _exposed(node.body, defined | set(targets))[0]
            case ast.If():
                exposed |= _reads(node.test) - defined
                yes, defined_if = _exposed(node.body, defined)
                no, defined_else = _exposed(node.orelse, defined)
                exposed |= yes | no
                defined |= defined_if & defined_else
            case ast.With():
                for item in node.items:
                    exposed |= _reads(item.context_expr) - defined
                    defined |= set() if item.optional_vars is None else set(_names(item.optional_vars))
                inner, defined = _exposed(node.body, defined)
                exposed |= inner
            case ast.Try():
                for part in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                    exposed |= _exposed(part, defined)[0]
            case _:
                exposed |= _reads(node) - defined
                if isinstance(node, ast.AugAssign):
                    exposed |= {*_names(node.target), *_bases(node.target)} - defined
                defined |= _assigned_plainly(node)
    return exposed, defined


@cache
def is_users_file(file: str) -> bool:
    """Return whether code of this file is the user's; cells of notebooks are."""
    if file.startswith("<frozen"):
        return False
    path = Path(file)
    if path.is_relative_to(_APPS):
        return True
    return not any(path.is_relative_to(place) for place in _library_places())


def is_users_type(kind: type) -> bool:
    """Return whether a class is defined in the user's code."""
    if kind.__module__ == "__main__":
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_users_file(file)


@cache
def _library_places() -> tuple[Path, ...]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [*site.getsitepackages(), site.getusersitepackages(), str(PACKAGE)]
    found = {Path(place) for place in places if place}
    return tuple(found | {place.resolve() for place in found})
