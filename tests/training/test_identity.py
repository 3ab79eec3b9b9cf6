"""A training job's code is distinguished from other code, but not from the same code elsewhere."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import runpy
import subprocess
import sys
import textwrap
import types
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from freetrain_parsl.protocol.options import Code
from freetrain_parsl.training.checkpoints.code.code_identity import _digest, code_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_number = itertools.count()


def compiled(source: str, has_source: bool = True) -> Any:
    """Run a script, or a cell of a notebook; return its function `train`."""
    module = types.ModuleType("app")
    text = textwrap.dedent(source)
    with mock.patch.dict(sys.modules, {"app": module}):  # dataclasses look up the module there
        exec(compile(text, cell(text) if has_source else "<string>", "exec", dont_inherit=True), vars(module))
    return module.train


def cell(text: str) -> str:
    """Register a source as IPython does; return its file name."""
    name = f"<cell {next(_number)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return name


SCRIPT = """
import math
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

RATE = 0.1
WIDTHS = [8, 16]
MODES = {"a", "b"}
WEIGHTS = torch.tensor([1.0, 2.0])

class Mode(Enum):
    FAST = 1

MODE = Mode.FAST

@dataclass
class Config:
    depth: int = 3

CONFIG = Config()

class Block(nn.Module):
    def forward(self, x):
        return scale(x)

class Net(Block):
    size = 4

    @staticmethod
    def initial(x):
        return x

    @property
    def width(self):
        return WIDTHS[0]

def scale(x):
    return x * FACTOR

FACTOR = 2

def augment(x, strength=1):
    return x + strength

transform = partial(augment, strength=2)

def deco(function):
    def wrapper(*args):
        return function(*args) + 0
    return wrapper

@deco
def decorated(x):
    return x

def unused():
    return 1

def train(session, lr=RATE, *, decay=0.5):
    \"\"\"Train.\"\"\"
    net = Net()
    for x in range(10):  # steps
        if x in MODES and MODE is Mode.FAST:
            x = transform(x) + decorated(x)
        def inner(y):
            return y + math.pi + CONFIG.depth
    return [net(x) for x in WIDTHS if x], WEIGHTS, inner, (lambda z: z + 1), (yield_all(x) if x else None)

def yield_all(x):
    try:
        yield x
    finally:
        print("done")
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RATE = 0.1", "RATE = 0.2"),  # a default
        ("WIDTHS = [8, 16]", "WIDTHS = [8, 17]"),
        ('MODES = {"a", "b"}', 'MODES = {"a", "c"}'),
        ("torch.tensor([1.0, 2.0])", "torch.tensor([1.0, 3.0])"),
        ("FAST = 1", "FAST = 2"),
        ("depth: int = 3", "depth: int = 4"),
        ("CONFIG = Config()", "CONFIG = Config(5)"),
        ("FACTOR = 2", "FACTOR = 3"),  # used by a function that a method of a base class calls
        ("return scale(x)", "return -scale(x)"),
        ("class Net(Block)", "class Net(nn.Module)"),
        ("size = 4", "size = 5"),
        ("return x\n\n    @property", "return -x\n\n    @property"),  # a static method
        ("WIDTHS[0]", "WIDTHS[1]"),  # a property
        ("strength=2)", "strength=3)"),  # a partial
        ("x + strength", "x - strength"),
        ("function(*args) + 0", "function(*args) + 1"),  # a decorator without functools.wraps
        ("def decorated(x):\n    return x", "def decorated(x):\n    return x + x"),
        ("decay=0.5", "decay=0.6"),
        ("range(10)", "range(11)"),
        ("y + math.pi", "y + math.e"),
        ("z + 1", "z + 2"),
        ("WIDTHS if x]", "WIDTHS if not x]"),
        ('print("done")', 'print("end")'),
        ("        yield x\n    finally:", "        pass\n    finally:"),
        ("    try:\n        yield x\n    finally:\n        print", "    yield x\n    if True:\n        print"),
    ],
)
@pytest.mark.parametrize("has_source", [True, False], ids=["syntax tree", "bytecode"])
def test_a_change_of_what_the_function_refers_to_counts(old: str, new: str, has_source: bool) -> None:
    assert old in SCRIPT
    before, after = (code_of(compiled(text, has_source)) for text in (SCRIPT, SCRIPT.replace(old, new)))
    assert before.identity != after.identity
    assert after.changes_since(before) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # steps", "  # other steps"),
        ("Train.", "Train well."),
        ("RATE = 0.1", "\n\n# the rate\nRATE = 0.1"),
        ("return 1\n", "return 2\n"),  # never called
        ("lr=RATE", "lr: float = RATE"),
        ("net = Net()", "net: nn.Module = Net()"),
        ("[net(x) for x in WIDTHS if x]", "[\n        net(x)\n        for x in WIDTHS\n        if x\n    ]"),
    ],
)
def test_comments_docstrings_formatting_and_what_is_not_used_do_not_count(old: str, new: str) -> None:
    assert old in SCRIPT
    assert code_of(compiled(SCRIPT)) == code_of(compiled(SCRIPT.replace(old, new)))


def test_what_has_changed_is_named() -> None:
    before = code_of(compiled(SCRIPT))
    after = code_of(compiled(SCRIPT.replace("FACTOR = 2", "FACTOR = 3").replace("x + strength", "x - strength")))
    assert after.changes_since(before) == ["app.FACTOR", "app.augment"]


def functions(code: types.CodeType) -> Iterator[types.CodeType]:
    if code.co_flags & inspect.CO_NEWLOCALS and code.co_name[0] != "<":
        yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from functions(constant)


@pytest.mark.parametrize("module", ["argparse", "torch.optim.adam", "inspect", "tarfile"])
def test_formatting_does_not_count_in_any_function_of_large_modules(module: str) -> None:
    """Compiled from the original text, and from the text without its layout."""
    source = inspect.getsource(importlib.import_module(module))
    one, other = (
        list(functions(compile(text, cell(text), "exec"))) for text in (source, ast.unparse(ast.parse(source)))
    )
    assert len(one) > 5
    for left, right in zip(one, other, strict=True):
        assert _digest(left, left.co_filename) == _digest(right, right.co_filename), left.co_name


DIFFERENT = {
    "condition": ("return s and t", "return s or t"),
    "branches": ("if s: return 1\n return 2", "if s: return 2\n return 1"),
    "test for truth": ("if s: g()", "if s is not None: g()"),
    "end of a loop": ("for x in s:\n  if x: break\n  g(x)", "for x in s:\n  if x: continue\n  g(x)"),
    "number of repeats": ("g(s); g(s)", "g(s); g(s); g(s)"),
    "what is covered": (
        "try: g(s)\n except ValueError: h(s)\n g(s)",
        "try: g(s); g(s)\n except ValueError: h(s)",
    ),
    "raised error": ("raise ValueError", "raise ValueError from None"),
    "one of two in a line": ("return (lambda x: x + 1), (lambda x: x)", "return (lambda x: x + 1), (lambda x: -x)"),
    "field of a class": ("class C:\n  x: int", "class C:\n  y: int"),
}


@pytest.mark.parametrize("has_source", [True, False], ids=["syntax tree", "bytecode"])
@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_what_a_function_does_counts(pair: tuple[str, str], has_source: bool) -> None:
    one, other = (code_of(compiled(f"def train(s, t=0):\n {body}", has_source)) for body in pair)
    assert one != other


@pytest.mark.parametrize("has_source", [True, False], ids=["syntax tree", "bytecode"])
def test_every_changed_operator_comparison_condition_and_branch_counts(has_source: bool) -> None:
    """Mutants of a large function of the standard library."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getsourcefile)))
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    function.name = "train"
    before = code_of(compiled(ast.unparse(tree), has_source))
    mutants = list(_mutants(tree))
    assert len(mutants) > 15
    assert [mutant for mutant in mutants if code_of(compiled(mutant, has_source)) == before] == []


def _mutants(tree: ast.AST) -> Iterator[str]:
    for number in range(len(list(ast.walk(tree)))):
        changed = copy.deepcopy(tree)
        node = list(ast.walk(changed))[number]
        if isinstance(node, ast.BoolOp):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.Compare):
            node.ops[0] = {ast.In: ast.NotIn, ast.IsNot: ast.Is, ast.Is: ast.IsNot, ast.Eq: ast.NotEq}.get(
                type(node.ops[0]), ast.Lt
            )()
        elif isinstance(node, ast.If):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Call) and node.args:
            node.args.append(node.args[0])
        elif isinstance(node, ast.Attribute):
            node.attr += "x"
        else:
            continue
        yield ast.unparse(ast.fix_missing_locations(changed))


def test_decorators_and_the_text_of_defaults_do_not_count() -> None:
    """Options of the app are arguments of its decorator."""
    plain = "same = lambda f: f\nTEN = 10\ndef train(s, n=10): return n"
    assert code_of(compiled(plain)) == code_of(compiled(plain.replace("def", "@same\ndef").replace("n=10", "n=TEN")))


def test_the_code_that_runs_counts_and_not_what_its_file_contains_now(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"

    def written(text: str) -> Any:
        file.write_text(text)
        return runpy.run_path(str(file))["train"]

    first = written("def train(s): return 1")
    before = code_of(first)
    second = written("def train(s):\n  return 20")
    third = written("def train(s):\n  return 300")
    assert code_of(first) == before
    assert len({code_of(function).digest for function in (first, second, third)}) == 3


def test_the_identity_is_readable() -> None:
    code = code_of(compiled("def train(session): pass"))
    assert code.identity == f"app:train#{code.digest}"


def test_wrappers_are_looked_through() -> None:
    def train(session: Any) -> None:
        """Do nothing."""

    @functools.wraps(train)
    def wrapper(session: Any) -> None:
        train(session)

    assert code_of(wrapper).identity == code_of(train).identity


def test_an_equal_function_without_a_source_does_not_stand_in_for_one_that_has_it() -> None:
    """Python takes code of different files for equal."""
    text = 'def train(session):\n    """{}."""\n    return 3.25'
    code_of(compiled(text.format("One"), has_source=False))
    assert code_of(compiled(text.format("One"))) == code_of(compiled(text.format("Other")))


def test_a_closure_counts() -> None:
    def make(rate: float) -> Any:
        def train(session: Any) -> float:
            return rate

        return train

    assert code_of(make(0.1)) == code_of(make(0.1))
    assert code_of(make(0.1)) != code_of(make(0.2))


def test_callables_of_other_kinds_have_a_code() -> None:
    class Training:
        def __init__(self, rate: float) -> None:
            self.rate = rate

        def __call__(self, session: Any) -> float:
            return self.rate

    assert code_of(Training(0.1)).parts.keys() == code_of(Training(0.2)).parts.keys()
    code_of(print)
    code_of(functools.partial(print, 1))


def test_what_holds_itself_and_what_is_recursive_is_told() -> None:
    code = code_of(compiled("LOOP = []\nLOOP.append(LOOP)\ndef train(s): return train, LOOP"))
    assert code.parts.keys() == {"app.train", "app.LOOP"}


def test_objects_without_a_value_of_their_own_do_not_count_by_their_address() -> None:
    source = "import threading\nLOCK, THING = threading.Lock(), object()\ndef train(s): return LOCK, THING"
    assert code_of(compiled(source)) == code_of(compiled(source))


def test_data_is_not_code() -> None:
    """A large global list is not treated as a constant."""
    source = "DATA = list(range({}))\ndef train(s): return DATA"
    assert code_of(compiled(source.format(10))) != code_of(compiled(source.format(10).replace("range(", "range(1, ")))
    assert code_of(compiled(source.format(100_000))).parts["app.DATA"]


def test_another_version_of_python_says_nothing() -> None:
    code = code_of(compiled("def train(session): return 1"))
    other = code_of(compiled("def train(session): return 2"))
    assert other.changes_since(Code(code.name, code.parts, "3.1")) == []


SEPARATE = {
    "models.py": "WIDTH = 3\nclass Net:\n    def width(self):\n        return WIDTH\ndef unused():\n    return 1\n",
    "script.py": """
import models
from models import Net
from freetrain_parsl.training.checkpoints.code.code_identity import code_of

def train(session):
    return {"a", "b", "c", "d", "e"}, models.Net, Net().width()

code = code_of(train)
print(code.identity, sorted(code.parts))
""",
}


def run(directory: Path, seed: str = "0", **changes: str) -> str:
    directory.mkdir(exist_ok=True)
    for name, text in SEPARATE.items():
        changed = functools.reduce(lambda so_far, change: so_far.replace(*change), changes.items(), text)
        (directory / name).write_text(changed)
    command = [sys.executable, "-B", str(directory / "script.py")]
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_it_is_the_same_in_every_process_and_modules_beside_the_script_count(tmp_path: Path) -> None:
    said = run(tmp_path / "a", seed="1")
    assert said == run(tmp_path / "b", seed="2")
    assert said.startswith("__main__:train#")
    assert "['__main__.train', 'models.Net', 'models.Net.width', 'models.WIDTH']" in said
    assert run(tmp_path / "c", WIDTH="DEPTH") != said
    assert run(tmp_path / "d", unused="renamed") == said
