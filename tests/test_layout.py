"""The layout holds: only extensions import extensions, and no room or folder outgrows its figure.

Rooms, and what they import of each other, are in `test_repository`. Whoever raises a figure says why in the diff;
whoever makes a room smaller lowers its figure.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from math import ceil
from typing import TYPE_CHECKING, Final

import pytest

from tests.test_repository import EXTENSIONS, MODULES, NAMES, PACKAGE, ROOMS, imports, name_of, parsed, room_of

if TYPE_CHECKING:
    from pathlib import Path

MOST_MODULES: Final = 16
"""In a folder, ``__init__`` aside."""

MOST_FILES: Final = 519  # deferred compiler, recovery, NCCL, shards in place; a group's changes and steps apart
"""With more than a docstring."""

CORE: Final = ("", "planning", "protocol", "windows", "executor", "training", "storage")
"""What a newcomer reads; ``""`` is the top level."""

# Room -> most lines, at most 3 % above what is there.
BUDGET: Final = {
    "": 2_240,  # the app's option `stage`, and how far a failed member had come
    "campaign": 5_380,  # `stage` in campaigns
    "cli": 2_580,
    "cluster": 3_200,
    "executor": 15_615,  # deferred compiler, recovery, refused counts, indices of slots, long validations, strays
    "extensions/checking": 3_215,
    "extensions/dashboard": 920,
    "extensions/demo": 1_020,
    "extensions/fusion": 9_590,  # members in turns, kept for later runs; sparse arguments; changes; timers of steps
    "extensions/globus": 8_460,
    "extensions/goodput": 1_310,
    "extensions/integrations": 1_900,
    "extensions/notebook": 1_980,
    "extensions/pages": 1_110,
    "extensions/pbs": 1_510,
    "extensions/replay": 6_940,
    "extensions/resources": 1_050,
    "extensions/sharding": 3_350,  # counts that fully_shard refuses, shards that stay in their place
    "extensions/staging": 1_450,  # copies of users' data; listings in images; memory in Slurm's units
    "extensions/simulate": 1_860,
    "extensions/sweeps": 317,
    "extensions/trackers": 397,
    "planning": 8_005,  # what an event about one node changes is known; a core is added up; blocks that wait
    "protocol": 2_125,  # refused counts, who was lost, shared bases, texts that are searched in C
    "report": 3_240,  # the same in words, and why a job has none of the free nodes
    "storage": 2_220,
    "testing": 1_680,
    "training": 14_455,  # groups aborted at once, no lost messages; attempts at a batch; code around the batches
    "windows": 3_350,
}


@cache
def lines_of(module: Path) -> int:
    return module.read_text(encoding="utf-8").count("\n")


def lines_of_rooms() -> dict[str, int]:
    """Return room -> lines of its Python files."""
    lines: Counter[str] = Counter()
    for module in MODULES:
        lines[room_of(module)] += lines_of(module)
    return dict(sorted(lines.items()))


def modules_with_content() -> list[Path]:
    """Return the modules that hold more than a docstring."""
    return [module for module in MODULES if len(parsed(module).body) > 1]


def _texts(module: Path) -> set[str]:
    """Return the modules of extensions that are named in texts, docstrings aside."""
    tree = parsed(module)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and _is_text(n.body[0])}
    docstrings |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.stmt) and _is_text(n)}
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    return {found for text in texts for found in re.findall(r"\bfreetrain_parsl\.extensions(?:\.\w+)+", text)}


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def imports_of_extensions() -> set[str]:
    """Return all imports of extensions by other modules, and names of extensions in these modules' texts."""
    found = set()
    for module in MODULES:
        if module.relative_to(PACKAGE).parts[0] == "extensions":
            continue
        named = (imports(module) | _texts(module)) & NAMES.keys()
        importer = name_of(module).removeprefix("freetrain_parsl.")
        found |= {
            f"{importer} -> {name.removeprefix('freetrain_parsl.')}"
            for name in named
            if name.startswith("freetrain_parsl.extensions")
        }
    return found


def test_nothing_but_extensions_imports_extensions():
    """It finds what they bring by entry points."""
    assert imports_of_extensions() == set()


def test_extensions_import_each_other_in_one_direction():
    """Which extension imports which has no circle."""
    tuple(TopologicalSorter({room: ROOMS[room] & EXTENSIONS for room in EXTENSIONS}).static_order())


@pytest.mark.parametrize("room", BUDGET, ids=lambda room: room or "top level")
def test_a_room_keeps_to_its_budget(room):
    """It is not larger than its figure, and the figure is not far above it."""
    there = lines_of_rooms()[room]
    assert there <= BUDGET[room]
    assert BUDGET[room] <= ceil(1.03 * there), "lower the figure"


def test_every_room_has_a_budget():
    """A new room states its size."""
    assert lines_of_rooms().keys() == BUDGET.keys()


def test_folders_are_small():
    """A newcomer sees at a glance what is in a folder."""
    folders = Counter(module.parent.relative_to(PACKAGE) for module in MODULES if module.name != "__init__.py")
    assert {str(folder): count for folder, count in folders.items() if count > MOST_MODULES} == {}


def test_there_are_not_too_many_files():
    """Files of 60 lines that are only understood together want to be one."""
    assert len(modules_with_content()) <= MOST_FILES
