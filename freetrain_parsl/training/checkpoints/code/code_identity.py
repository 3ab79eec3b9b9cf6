"""The identity of a training job's code, to detect that a checkpoint was written by other code.

The identity covers the training function and everything it refers to in the user's own files, scripts and notebooks:
functions, classes, constants, defaults and closures. Libraries (modules in the directories of Python and its packages)
are not included. The digest of a function is of its syntax tree: comments, docstrings, annotations and formatting do
not change it. If no source compiles to the code that runs, because there is none or it has been edited since, the
digest is of the bytecode. Both are the same in every process of one minor version of Python.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import inspect
import linecache
import re
import site
import sys
import sysconfig
import types
import warnings
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from freetrain_parsl.protocol.options import Code, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["code_of", "in_library", "is_own"]

_NO_EFFECT = {"NOP", "CACHE", "RESUME", "EXTENDED_ARG", "PRECALL", "NOT_TAKEN"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, PurePath)
_BY_REPR = {
    "datetime",
    "decimal",
    "fractions",
    "numpy",
    "uuid",
}  # modules whose objects are values, fully described by their repr
_MOST_ITEMS = 4096  # up to this size a global list or tensor is a constant; above, it is data
_NOT_CODE = {
    "__module__", "__doc__", "__dict__", "__weakref__", "__qualname__", "__firstlineno__", "__static_attributes__",
    "__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "__parameters__", "__orig_bases__",
    "__slotnames__", "__dataclass_fields__", "__dataclass_params__", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


def code_of(function: Callable[..., Any]) -> Code:
    """Return the code of a function or another callable; wrappers made with `functools.wraps` are unwrapped."""
    function = inspect.unwrap(function)
    walk = _Walk()
    walk.add(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Code(f"{getattr(function, '__module__', None) or '?'}:{name}", walk.parts)


class _Walk:
    """Traverses everything that a function refers to in the user's own code."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # functions and classes; kept alive so that ids stay unique
        self._open: set[int] = set()  # values being described: one may contain itself

    def add(self, value: Any) -> str:
        """Add a function or class if it is the user's own; return the text that represents a reference to it."""
        value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
        if not isinstance(value, (type, types.FunctionType)):
            return self._object(value)
        label = f"{value.__module__}.{value.__qualname__}"
        if id(value) in self._seen or not is_own(value.__module__):
            return label
        self._seen[id(value)] = value
        digest = self._class(value) if isinstance(value, type) else self._function(value)
        # Two objects with one name, such as lambdas: both are included.
        self.parts[label] = digest if label not in self.parts else digest_of(sorted([self.parts[label], digest]))
        return label

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        self._globals(code, function.__globals__)
        closure = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # the class that contains the function
                closure.append(f"{name}={self._cell(cell)}")
        defaults = [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        return digest_of([_digest(code, code.co_filename), *defaults, *closure])

    def _cell(self, cell: Any) -> str:
        try:
            return self.value(cell.cell_contents)
        except ValueError:  # not filled yet
            return "empty"

    def _class(self, cls: type) -> str:
        tokens = [self.add(base) for base in cls.__bases__]
        for name, value in sorted(vars(cls).items()):
            if name not in _NOT_CODE and not name.startswith("_abc_"):
                tokens.append(f"{name}={self._member(value)}")
        return digest_of(tokens)

    def _member(self, value: Any) -> str:
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__}({self._member(value.__func__)})"
        if isinstance(value, property):
            return f"property({[self._member(part) for part in (value.fget, value.fset, value.fdel)]})"
        if isinstance(value, functools.cached_property):
            return f"cached_property({self._member(value.func)})"
        return self.value(value)

    def _globals(self, code: types.CodeType, names: Mapping[str, Any]) -> None:
        """Add what a code object and its nested code objects refer to by global names."""
        owner: types.ModuleType | None = None
        for instruction in dis.get_instructions(code):
            if instruction.opname in _NO_EFFECT:
                continue
            name = instruction.argval
            if instruction.opname in _GLOBALS and name in names and not name.startswith("__"):
                found, module = names[name], names.get("__name__")
            elif instruction.opname in _ATTRIBUTES and owner is not None and hasattr(owner, name):
                found, module = getattr(owner, name), owner.__name__
            else:
                owner = None
                continue
            owner = found if isinstance(found, types.ModuleType) and is_own(found.__name__) else None
            if not isinstance(found, types.ModuleType):
                self._global(f"{module}.{name}", found)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._globals(constant, names)

    def _global(self, label: str, value: Any) -> None:
        if isinstance(inspect.unwrap(value) if callable(value) else value, (type, types.FunctionType)):
            self.add(value)
        elif label not in self.parts:
            self.parts[label] = ""  # while it is processed, which may lead here again
            self.parts[label] = digest_of([self.value(value)])

    def value(self, value: Any) -> str:
        """Return a text that distinguishes a value from others and is the same in every process."""
        if isinstance(value, Enum):
            return f"{self.add(type(value))}.{value.name}"
        if isinstance(value, _SIMPLE):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, types.CodeType):
            return _bytecode_digest(value)
        if isinstance(value, re.Pattern):
            return f"pattern:{value.pattern!r} {value.flags}"
        if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > _MOST_ITEMS:
            return f"{type(value).__qualname__} of {len(value)}"
        if isinstance(value, (set, frozenset)):
            return f"set{sorted(self.value(item) for item in value)}"
        if isinstance(value, (types.FunctionType, type)):
            return self.add(value)
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        try:
            if isinstance(value, (list, tuple)):
                return f"{type(value).__qualname__}{[self.value(item) for item in value]}"
            if isinstance(value, dict):
                items = [(self.value(key), self.value(item)) for key, item in value.items()]
                return f"{type(value).__qualname__}{items}"
            return self.add(value)
        finally:
            self._open.discard(id(value))

    def _object(self, value: Any) -> str:
        """Describe an object by its type and, if the type is the user's own or a plain record, by its attributes."""
        cls = type(value)
        label = f"{cls.__module__}.{cls.__qualname__}"
        if isinstance(value, types.MethodType):
            return f"{self.add(value.__func__)} of {self.value(value.__self__)}"
        if isinstance(value, functools.partial):
            return f"partial({self.add(value.func)}, {self.value(value.args)}, {self.value(value.keywords)})"
        if label in {"torch.Tensor", "numpy.ndarray"}:
            return f"{label}:{_elements(value)}"
        if cls.__module__ in _BY_REPR or label in {"torch.dtype", "torch.device", "torch.Size"}:
            return f"{label}:{value!r}"
        if is_own(cls.__module__):
            return f"{self.add(cls)}{self.value(getattr(value, '__dict__', None))}"
        if label in {"types.SimpleNamespace", "argparse.Namespace"}:
            return f"{label}{self.value(vars(value))}"
        return label


@functools.lru_cache(maxsize=4096)  # also: an edit of its file does not change the digest of a function that runs
def _digest(code: types.CodeType, file: str) -> str:
    """Return a digest of a function's syntax tree, or of its bytecode if no source in its file compiles to it.

    The file is an argument for the cache's sake: code of different files is equal for Python.
    """
    running = _bytecode_digest(code)
    linecache.checkcache(file)
    for name, compiled, tree in _functions_in("".join(linecache.getlines(file))):
        if name == code.co_name and _bytecode_digest(compiled) == running:
            return tree
    return running


def _bytecode_digest(code: types.CodeType) -> str:
    tokens = [f"{code.co_name} {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"]
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    tokens.append(repr(code.co_varnames[: arguments + bool(code.co_flags & inspect.CO_VARKEYWORDS)]))
    tokens.append(f"{code.co_flags & _FLAGS} {getattr(code, 'co_exceptiontable', b'')!r}")  # from Python 3.11 on
    walk = _Walk()
    tokens += [
        f"{one.opname} {walk.value(one.argval)}" for one in dis.get_instructions(code) if one.opname not in _NO_EFFECT
    ]
    return digest_of(tokens)


@functools.lru_cache(maxsize=16)
def _functions_in(source: str) -> list[tuple[str, types.CodeType, str]]:
    """Return the functions in a source: name, code, and the digest of the syntax tree."""
    try:
        with warnings.catch_warnings():  # which its import has given already
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            waiting = [compile(tree, "source", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError):
        return []
    codes: dict[tuple[str, int], list[types.CodeType]] = {}
    while waiting:
        code = waiting.pop()
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    found = []
    for node in ast.walk(_Normalizer().visit(tree)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            name, decorators = getattr(node, "name", "<lambda>"), getattr(node, "decorator_list", [])
            here = codes.get((name, decorators[0].lineno if decorators else node.lineno), [])
            if len(here) == 1:  # else several in one line, which only their bytecode distinguishes
                found.append((name, here[0], _tree_digest(name, node)))
    return found


def _tree_digest(name: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> str:
    """Return the digest of a function without its decorators and defaults: their values count, not their text."""
    arguments = copy.copy(node.args)
    arguments.defaults, arguments.kw_defaults = [], []
    body = node.body if isinstance(node.body, list) else [node.body]
    return digest_of([type(node).__name__, name, *(ast.dump(part) for part in (arguments, *body))])


class _Normalizer(ast.NodeTransformer):
    """Removes docstrings, annotations and other statements without effect."""

    def visit(self, node: ast.AST) -> Any:
        match node:
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                return None
            case ast.ClassDef():  # its annotations may be fields: of a dataclass, for example
                parts = [part if isinstance(part, ast.AnnAssign) else self.visit(part) for part in node.body]
                node.body = [part for part in parts if part is not None]
                return node
            case ast.AnnAssign():
                self.generic_visit(node)
                return None if node.value is None else ast.Assign([node.target], node.value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
        return self.generic_visit(node)


def _elements(array: Any) -> str:
    """Describe a global tensor or array: by its elements if it is small and readable, else by its shape."""
    shape = f"{tuple(array.shape)} {array.dtype}"
    count = 1
    for size in array.shape:
        count *= size
    if count > _MOST_ITEMS:
        return shape
    try:
        return f"{shape} {array.tolist()!r}"
    except Exception:  # noqa: BLE001 - meta, sparse, quantized, … tensors raise different errors
        return shape


@functools.cache
def is_own(module: str | None) -> bool:
    """Return whether a module is the user's own: a script, a notebook, or a file outside the package directories."""
    if module in (None, "__main__", "__mp_main__"):
        return True
    assert module is not None, "checked above"
    if module.partition(".")[0] == "freetrain_parsl" or module in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # created by exec, or no longer imported
        return module.partition(".")[0] not in sys.stdlib_module_names
    return not in_library(file)


def in_library(file: str) -> bool:
    """Return whether a file is in the directories of Python and its packages."""
    return any(Path(file).resolve().is_relative_to(place) for place in _library_places())


@functools.cache
def _library_places() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_path(name) for name in names]
    places += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({Path(place).resolve() for place in places if place})
