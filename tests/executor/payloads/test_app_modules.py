"""Each app has the modules of its own directory, here and on the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl.campaign.files.apps import load_app
from freetrain_parsl.executor.payloads import app_modules
from freetrain_parsl.executor.payloads.payloads import pack_training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_APP = """
from freetrain_parsl import training_app
from helper_of_app import Net

@training_app
def train(session, kind=Net):
    from helper_of_app.deeper import WHERE  # only when it runs
    return Net.whose, kind.whose, WHERE
"""

_NODE = """
import sys
from pathlib import Path
from freetrain_parsl.executor.payloads.payloads import unpack_training
function, args, kwargs = unpack_training(Path(sys.argv[1]).read_bytes())
print(*function(None, *args, **kwargs))
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make two directories with apps, whose modules have the same names."""
    for name in ("a", "b"):
        helper = tmp_path / name / "helper_of_app"
        helper.mkdir(parents=True)
        (helper / "__init__.py").write_text(f"class Net:\n    whose = {name!r}\n    of_the_class = 1\n")
        (helper / "deeper.py").write_text(f"WHERE = {name!r}\n")
        for number in (1, 2):
            (tmp_path / name / f"app_{name}{number}.py").write_text(_APP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(app_modules, "_apps", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _loaded(places: Path, *names: str) -> dict[str, Any]:
    return {name: load_app(f"{name[0]}/app_{name}.py:train", places)[0] for name in names}


def test_apps_of_two_directories_have_their_own_modules_and_those_of_one_share_them(places: Path) -> None:
    apps = _loaded(places, "a1", "b1", "a2", "b2")
    nets = {name: app.func.__globals__["Net"] for name, app in apps.items()}
    assert {name: net.whose for name, net in nets.items()} == {"a1": "a", "b1": "b", "a2": "a", "b2": "b"}
    assert nets["a1"] is nets["a2"]
    assert nets["b1"] is nets["b2"]


@pytest.mark.slow
@pytest.mark.parametrize("order", [("a1", "b1"), ("b1", "a1")])
def test_a_node_trains_with_the_modules_of_the_apps_directory(places: Path, order: tuple[str, ...]) -> None:
    """Its own search path has both, and the classes are sent by reference."""
    found = {}
    path = os.pathsep.join([*(str(places / name[0]) for name in order), *filter(None, [os.environ.get("PYTHONPATH")])])
    for name, app in _loaded(places, *order).items():
        payload = pack_training(app.func, (), {"kind": app.func.__globals__["Net"]})
        assert b"of_the_class" not in payload, "only its name"
        (places / name).write_bytes(payload)
        command = [sys.executable, "-c", _NODE, str(places / name)]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
        )
        found[name] = done.stdout.split() or done.stderr
    assert found == {"a1": ["a"] * 3, "b1": ["b"] * 3}


def test_a_function_of_a_library_brings_no_directory(places: Path) -> None:
    assert app_modules.directory_of(os.path.join) == ""
    assert app_modules.directory_of(pytest.main) == ""
    (app,) = _loaded(places, "a1").values()
    assert app_modules.directory_of(app.func) == str(places / "a")


_SCRIPT = """
from freetrain_parsl.executor.payloads.app_modules import directory_of
def train(session): pass
of_a_cell = {"__name__": "__main__"}
exec(compile("def train(session): pass", "<cell>", "exec"), of_a_cell)
print(directory_of(train), directory_of(of_a_cell["train"]), sep="|")
"""


@pytest.mark.smoke
@pytest.mark.slow
def test_a_scripts_function_brings_the_scripts_directory_but_a_cells_function_none(tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "run.py").write_text(_SCRIPT)
    done = subprocess.run([sys.executable, "script/run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path / 'script'}|\n", done.stderr
