"""The repository as a whole: versions agree, imports are layered and without cycles, nothing is missing."""

from __future__ import annotations

import ast
import re
import stat
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import requires, version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import freetrain_parsl

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "freetrain_parsl"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(module: Path) -> str:
    """Return the dotted name by which a module is imported."""
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(module): module for module in MODULES}

# Room -> rooms that it may import, for type checkers too. Each may import the top level and itself. What the core, and
# campaign, cli, report and testing import of extensions is in tests/test_layout.py, as a list that may only shrink.
ROOMS = {
    "planning": set(),
    "protocol": {"planning"},
    "windows": {"planning"},
    "training": {"protocol", "planning", "storage"},
    "storage": set(),
    "cluster": {"planning", "windows"},
    "executor": {"protocol", "planning", "windows", "training", "storage", "cluster"},
    "campaign": {"protocol", "planning", "windows", "training", "storage", "cluster", "executor", "report"},
    "report": {"protocol", "planning", "executor", "storage", "windows"},
    "testing": {"protocol", "planning", "windows", "campaign", "cluster", "training", "executor", "storage"},
    "cli": {
        "protocol",
        "executor",
        "campaign",
        "report",
        "planning",
        "windows",
        "cluster",
        "training",
        "storage",
    },
    "extensions/checking": {"campaign", "cli", "protocol", "storage", "training", "extensions/fusion"},
    "extensions/dashboard": {"campaign", "cli", "report", "extensions/pages"},
    "extensions/demo": {"cli", "cluster", "executor", "planning", "report"},
    "extensions/fusion": {"executor", "planning", "protocol", "storage", "training"},
    "extensions/globus": {"campaign", "cli", "executor", "planning", "report", "storage", "windows"},
    "extensions/goodput": {"planning"},
    "extensions/integrations": {"cluster", "executor", "training"},
    "extensions/notebook": {
        "campaign",
        "executor",
        "planning",
        "protocol",
        "report",
        "storage",
        "training",
        "windows",
        "extensions/pages",
    },
    "extensions/pages": {"protocol", "report", "windows"},
    "extensions/pbs": {"executor", "planning", "windows"},
    "extensions/replay": {
        "campaign",
        "cli",
        "cluster",
        "executor",
        "planning",
        "protocol",
        "report",
        "windows",
        "extensions/fusion",
        "extensions/globus",
        "extensions/pages",
    },
    "extensions/resources": {"cli", "planning", "report"},
    "extensions/sharding": {"planning", "protocol", "storage", "training"},
    "extensions/staging": {"executor", "protocol", "storage", "training"},
    "extensions/simulate": {
        "cli",
        "planning",
        "report",
        "extensions/goodput",
        "extensions/pages",
        "extensions/replay",
    },
    "extensions/sweeps": set(),
    "extensions/trackers": {"executor"},
}

EXTENSIONS = {room for room in ROOMS if room.startswith("extensions/")}

# Subpackage -> external packages that it may import, of those that are heavy or create a dependency.
OUTSIDE = {
    "planning": {"numpy", "highspy", "yaml"},
    "protocol": set(),
    "windows": set(),
    "training": {"greenlet", "numpy", "psutil", "torch"},
    "storage": set(),
    "extensions/fusion": {"greenlet", "numpy", "torch"},
    "extensions/checking": {"numpy", "torch", "typer"},
    "testing": {"numpy", "pytest"},
}


def room_of(module: Path) -> str:
    """Return the room of a module: a subpackage, or an extension; top-level modules have none."""
    return room_named(module.relative_to(PACKAGE).with_suffix("").parts)


def room_named(parts: tuple[str, ...]) -> str:
    """Return the room of a dotted name without the package's."""
    if not (PACKAGE / parts[0]).is_dir() or parts[:2] == ("extensions", "__init__"):
        return ""
    return "/".join(parts[:2]) if parts[0] == "extensions" else parts[0]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _statements_in(node: ast.AST) -> list[ast.AST]:
    """Return the children that are or have statements, not the expressions, which are most nodes of a module."""
    return [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.stmt | ast.ExceptHandler | ast.match_case)]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in _statements_in(node):
        yield child
        yield from _statements(child)


@cache
def parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


@cache
def imports(module: Path, *, for_type_checkers: bool = True) -> set[str]:
    """Return the names of the modules that a module imports, including inside functions and ``if TYPE_CHECKING``."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(module)]
    while waiting:
        node = waiting.pop()
        if _is_type_checking(node) and not for_type_checkers:
            assert isinstance(node, ast.If)
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in NAMES else node.module for name in inside)
        waiting.extend(_statements_in(node))
    return found


def rooms_imported(module: Path) -> set[str]:
    names = {tuple(name.split(".")[1:]) for name in imports(module) if name.startswith("freetrain_parsl.")}
    return {room for parts in names if (room := room_named(parts))} - {room_of(module)}


def packages_imported(module: Path) -> set[str]:
    """Return the external packages that a module imports at run time."""
    first = {name.partition(".")[0] for name in imports(module, for_type_checkers=False)}
    return first - {"freetrain_parsl", "__future__", *sys.stdlib_module_names}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_run_one_way(room):
    """A subpackage imports only those below it."""
    modules = [module for module in MODULES if room_of(module) == room]
    assert modules
    below = ROOMS[room] | (set() if room.startswith("extensions/") else EXTENSIONS)
    wrong = {m.name: extra for m in modules if (extra := rooms_imported(m) - below)}
    assert wrong == {}


def test_no_modules_import_each_other():
    """The imports have no cycle, not even one through imports for type checkers or inside functions.

    A type that two modules need belongs in a third. That importing a module imports its packages does not count.
    """
    graph = {name: imports(module) & NAMES.keys() - {name} for name, module in NAMES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_imports_for_type_checkers_and_inside_functions_are_seen(tmp_path):
    """All kinds of imports are found: of a module, from a module, and of a module from its package."""
    module = tmp_path / "module.py"
    module.write_text(
        "if TYPE_CHECKING:\n    from freetrain_parsl.errors import UsageError\n"
        "def function():\n    from freetrain_parsl.planning import model\n    import freetrain_parsl.app\n"
    )
    run_time = {"freetrain_parsl.planning.model", "freetrain_parsl.app"}
    assert imports(module, for_type_checkers=False) == run_time
    assert imports(module) == run_time | {"freetrain_parsl.errors"}


def test_no_two_public_classes_share_a_name():
    """One name means one thing; only the journal's records are named after what they record.

    Their names are the kinds of the journal's entries, and other modules use them as ``record.NAME``.
    """
    homes: dict[str, list[str]] = {}
    for name, module in NAMES.items():
        if name == "freetrain_parsl.protocol.journal":
            continue
        for node in parsed(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
    assert "Record" not in homes


def test_records_of_the_journal_are_imported_under_the_name_record():
    """No module imports a single record, whose name another class may have, too."""
    taken = {
        alias.name
        for module in MODULES
        for node in _statements(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module == "freetrain_parsl.protocol.journal"
        for alias in node.names
    }
    assert taken <= {"Record", "record_of"}


@pytest.mark.parametrize("room", sorted(OUTSIDE))
def test_rooms_keep_to_their_packages(room):
    """The planner is pure, training does not import Parsl, windows use only the standard library."""
    modules = [module for module in MODULES if room_of(module) == room]
    wrong = {str(m.relative_to(ROOT)): extra for m in modules if (extra := packages_imported(m) - OUTSIDE[room])}
    assert wrong == {}


def test_no_class_is_a_thread():
    """Attributes of a subclass collide with the private ones of `Thread`, which differ between versions of Python."""
    classes = [
        (path.name, name, bases)
        for folder in ("freetrain_parsl", "apps", "benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name, bases in re.findall(r"^ *class (\w+)\(([^)]*)\):", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert len(classes) > 100
    assert [found for found in classes if re.search(r"\bThread\b", found[2])] == []


def test_cluster_knows_parsl_in_its_provider_only():
    """The embedded cluster is a batch system: it does not import torch, and imports Parsl only in its provider."""
    cluster = [module for module in MODULES if room_of(module) == "cluster"]
    assert [m.name for m in cluster if "parsl" in packages_imported(m)] == ["provider.py"]
    assert [m.name for m in cluster if "torch" in packages_imported(m)] == []


def test_every_room_has_a_place_in_the_order():
    """A new subpackage must list its allowed imports here."""
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("*/__init__.py")} - {"extensions"}
    rooms |= {f"extensions/{path.parent.name}" for path in PACKAGE.glob("extensions/*/__init__.py")}
    assert rooms == ROOMS.keys()


def test_versions_agree():
    """The version is defined only in the package and its metadata."""
    assert freetrain_parsl.__version__ == version("freetrain-parsl")


def test_changelog_has_an_unreleased_section():
    """The changelog has a section for the next changes."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert first is not None
    assert first[1] == "Unreleased"
    assert "### Added" in text


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition(";")[0].strip().partition("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): exact for name, _, exact in pins}


def test_constraints_pin_what_is_required():
    """Every direct dependency, including the dev extra, has one exact version without a local label."""
    needed = {
        re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", line)[0]).lower()
        for line in requires("freetrain-parsl")
        if "extra ==" not in line or re.search(r"extra == ['\"](dev|examples|report|docs|globus)['\"]", line)
    } - {"freetrain-parsl"}
    pins = _pins()
    assert needed <= pins.keys()
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", exact) for exact in pins.values())


def test_licence_is_apache_2():
    """The full text of the licence named in pyproject is present."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_packages_of_tests_are_in_packages():
    """Else the modules in them have the names of other top-level packages."""
    packages = {file.parent for file in (ROOT / "tests").rglob("__init__.py")}
    assert ROOT / "tests" in packages
    assert {folder for folder in packages if folder.parent not in {*packages, ROOT}} == set()


def test_ci_script_can_be_run():
    """`.ci/run` is executable and stops at the first failure."""
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


# Modules that print what is not for people, or not on a terminal of theirs -> why.
_PRINTERS = {
    "cli/__init__.py": "while modules are being imported; a constant",
    "cli/console.py": "is the place",
    "extensions/fusion/slot/array_run.py": "on a node: passes on what the user's function prints",
    "executor/slot/pilot.py": "on a node; a constant",
    "executor/slot/run_end.py": "on a node: the traceback of the user's function, which goes to the log",
    "extensions/demo/warm_start/client.py": "on a node",
    "extensions/demo/warm_start/server.py": "on a node",
    "extensions/integrations/accelerate.py": "is print, for the user's function",
}
_PRINTING = {"echo", "secho", "print_json", "from_markup", "StreamHandler"}


def _prints(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="print")):
            return True
        case ast.ImportFrom(module="rich.console" | "rich") if any(
            one.name in ("Console", "print") for one in node.names
        ):
            return True
        case ast.Attribute(attr=name) | ast.ImportFrom(names=[ast.alias(name=name)]) if name in _PRINTING:
            return True
        case ast.Attribute(attr="write" | "writelines", value=ast.Attribute(attr="stdout" | "stderr")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="write"), args=[ast.Constant(value=1 | 2), *_]):
            return True
    return False


def printers(modules: list[Path]) -> set[str]:
    """Return the modules that print by themselves."""
    return {
        module.relative_to(PACKAGE).as_posix()
        for module in modules
        if room_of(module) != "testing" and any(map(_prints, ast.walk(parsed(module))))
    }


def test_texts_are_printed_in_one_place():
    """Names, hosts, errors and outputs of commands may have escape sequences: `screen` and `Screen` take them out."""
    assert printers(MODULES) == _PRINTERS.keys()


@pytest.mark.parametrize(
    "line",
    [
        "print('x')",
        "typer.echo('x')",
        "from click import echo",
        "sys.stderr.write('x')",
        "os.write(2, b'x')",
        "from rich.console import Console, Group",
        "from rich import print",
        "Text.from_markup('x')",
        "logging.StreamHandler()",
    ],
)
def test_modules_that_print_are_found(line):
    """Each way to print, wherever it is, is seen by the test above."""
    assert any(map(_prints, ast.walk(ast.parse(f"def function():\n    {line}\n"))))
