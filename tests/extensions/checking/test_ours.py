"""The example apps, those of the demo, and the functions of the documentation survive being moved."""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from freetrain_parsl.extensions.checking.run import Checker, call_of
from freetrain_parsl.extensions.demo.command import _CAMPAIGN

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
APPS = ROOT / "apps"
HABITS = (ROOT / "docs" / "howto" / "pytorch-habits.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- habit: (\w+) -->\n```python\n(.*?)^```$", HABITS, re.DOTALL | re.MULTILINE))
COMMON = BLOCKS.pop("common")
SMALL = {
    "digits": {"epochs": 1, "width": 8},
    "char_lm": {"epochs": 2, "width": 16, "characters": 10_000},
    "hf_style": {"epochs": 2, "samples": 400},
    "llm": {"epochs": 1, "windows": 20, "batch_size": 8, "micro_batch": 2, "width": 16, "layers": 1, "context": 16},
    "lora": {"epochs": 1, "samples": 20, "width": 16, "layers": 1},
}


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.checkcache(str(file))
    return module


def assert_holds(function: Any, **arguments: Any) -> None:
    report = Checker(call_of(function, **arguments)).run()
    assert report.holds, str(report)


@pytest.mark.parametrize("name", sorted(path.stem for path in APPS.glob("*.py")))
def test_an_app_holds(name: str) -> None:
    for imported in ("sklearn.datasets", "transformers.models.llama"):  # once here, not in each of the forked processes
        importlib.import_module(imported)
    assert_holds(load(name, APPS / f"{name}.py").train, **SMALL[name])


def test_the_demo_trains_these_apps() -> None:
    assert {entry.app for entry in _CAMPAIGN} <= SMALL.keys()


@pytest.mark.parametrize("habit", sorted(BLOCKS))
def test_a_habit_of_the_docs_holds(habit: str, tmp_path: Path) -> None:
    file = tmp_path / f"{habit}.py"
    file.write_text(f"{COMMON}\n\n{BLOCKS[habit]}")
    if "backend=" in BLOCKS[habit]:  # the compiler's imports, once here, not in each of the forked processes
        torch.compile(torch.neg, backend="aot_eager", dynamic=True)(torch.ones(2, requires_grad=True))
    assert_holds(load(habit, file).train)


@pytest.mark.parametrize("name", ["train", "mended"])
def test_the_page_shows_what_is_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of output on the page of the check are those of its scripts, except for the time."""
    page = (ROOT / "docs" / "howto" / "check-a-training-function.md").read_text(encoding="utf-8")
    for file, code in re.findall(
        r"<!-- runnable: (\w+\.py) -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ):
        (tmp_path / file).write_text(code)
    monkeypatch.setitem(sys.modules, "train", load("train", tmp_path / "train.py"))
    (shown,) = re.findall(
        rf"^\$ freetrain check {name}\.py:train --set lr=0\.1\n(.*?)\n\n[\d.]+ s\n```$", page, re.DOTALL | re.MULTILINE
    )
    report = Checker(call_of(load(name, tmp_path / f"{name}.py").train, lr=0.1)).run()
    assert str(report).rpartition("\n\n")[0] == shown
