"""What a function is known to import is imported while a slot waits, in a process that only suits this function."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from parsl.serialize import deserialize, pack_apply_message

from freetrain_parsl.executor.payloads.payloads import pack_training
from freetrain_parsl.executor.slot import slot as slot_module
from freetrain_parsl.executor.slot.imports_ahead import ImportsNoted
from freetrain_parsl.executor.slot.loaded_files import pack_files, unpack_files
from freetrain_parsl.executor.slot.slot import run_slot
from freetrain_parsl.protocol.messages import (
    ModulesImported,
    Place,
    RunEnded,
    StartRun,
    StartTask,
    TaskEnded,
    Welcome,
)
from freetrain_parsl.protocol.options import Code, SessionOptions
from tests.executor.slot.slot_bench import SlotBench
from tests.executor.slot.test_place import running_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.executor.slot.test_place import _Driver

CODE = Code("app:train", {"app.train": "0"})
OTHER = Code("app:other", {"app.other": "0"})


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a directory of installed packages, in which each module notes the process that imports it."""
    directory = tmp_path / "site-packages"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    known = set(sys.modules)
    yield directory
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _write(packages: Path, name: str, text: str = "") -> None:
    note = "import os, pathlib\npathlib.Path(__file__).with_suffix('.pid').write_text(str(os.getpid()))\n"
    (packages / f"{name}.py").write_text(note + text)


def _importer(packages: Path, name: str, other_than: int = 0) -> int:
    """Return the process that has imported a module, once one has, or another one."""
    end = time.monotonic() + 60
    while not ((file := packages / f"{name}.pid").exists() and file.read_text() not in ("", str(other_than))):
        assert time.monotonic() < end, f"{name} is not imported"
        time.sleep(0.02)
    return int(file.read_text())


def test_installed_modules_are_noted_until_the_function_prepares_for_one(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that reads the environment when it is imported must find what the function has set."""
    monkeypatch.syspath_prepend(tmp_path)
    _write(tmp_path, "mine_of_user")
    _write(packages, "found_first", "os.environ['SET_BY_ITSELF'] = '1'\nimport found_second\n")
    for name in ("found_second", "app", "found_later"):
        _write(packages, name)
    monkeypatch.setenv("SET_BY_ITSELF", "0")
    noted = ImportsNoted(CODE)
    import found_first  # noqa: F401
    import mine_of_user  # noqa: F401
    import app  # noqa: F401  # isort: skip - installed, too, but the function's own

    monkeypatch.setenv("HF_HOME", "/somewhere")
    import found_later  # noqa: F401

    told = noted.told()
    assert told is not None
    assert (told.code, unpack_files(told.payload)) == (CODE.identity, ["found_first", "found_second"])
    assert noted not in sys.meta_path

    _write(packages, "found_lazy")
    _write(packages, "library", "def work():\n    import found_lazy\n")
    import library

    noted = ImportsNoted(OTHER)
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    library.work()
    assert noted.told() is None, "the library is called by the function, which has prepared for it"
    assert ImportsNoted(CODE).told() is None, "nothing was imported"


def test_slots_that_register_later_are_told() -> None:
    bench = SlotBench(("n0", "n1"))
    first, second = bench.open_tasks()
    bench.join(first, "n0")
    bench.cycle.imports_ahead = ModulesImported(CODE.identity, b"names")
    bench.join(second, "n1")
    assert bench.said == [Welcome(3600.0), Welcome(3600.0, CODE.identity, b"names")]


def _impatient(*arguments: Any) -> None:
    slot_module._LONGEST_IMPORT = 0.2
    run_slot(*arguments)


@pytest.fixture
def driver(tmp_path: Path, packages: Path) -> Iterator[_Driver]:
    with running_slot(tmp_path, _impatient) as driver:
        yield driver


def _process(_session: Any) -> int:
    return os.getpid()


def _start(driver: _Driver, directory: Path, run: int, code: Code, function: Callable[..., Any] = _process) -> Any:
    options = SessionOptions("t", directory / str(run), code=code)
    driver.send(StartRun("t", run, options, pack_training(function, (), {}), Place(run, 0, 1), 60.0))
    ended = driver.awaits(RunEnded)
    return deserialize(ended.payload)


def _welcome(*names: str) -> Welcome:
    return Welcome(3600.0, CODE.identity, pack_files(names))


@pytest.mark.slow
def test_a_job_finds_its_imports_made_and_every_other_job_a_process_without_them(
    driver: _Driver, packages: Path, tmp_path: Path
) -> None:
    _write(packages, "found_first")
    driver.send(_welcome("found_first"))
    first = _importer(packages, "found_first")
    assert _start(driver, tmp_path, 1, CODE) == first
    second = _importer(packages, "found_first", other_than=first)  # the next process of the slot
    assert _start(driver, tmp_path, 2, OTHER) != second
    third = _importer(packages, "found_first", other_than=second)
    driver.send(StartTask(1, pack_apply_message(os.getpid, (), {})))
    assert deserialize(driver.awaits(TaskEnded).payload) != third
    _write(packages, "found_first", "import time; time.sleep(1000)")
    assert _start(driver, tmp_path, 3, CODE) != third
    slow = _importer(packages, "found_first", other_than=third)
    assert _start(driver, tmp_path, 4, OTHER) != slow, "it does not wait for an import that it does not need"


@pytest.mark.slow
def test_an_import_that_is_not_as_expected_costs_a_process(driver: _Driver, packages: Path, tmp_path: Path) -> None:
    """It fails, uses random numbers, or hangs; it is not tried again."""
    bad = {
        "fails": "raise SystemExit(1)",
        "draws": "import random; random.random()",
        "hangs": "import time; time.sleep(600)",
    }
    for run, (name, text) in enumerate(bad.items()):
        _write(packages, name, text)
        driver.send(_welcome(name))
        importer = _importer(packages, name)
        assert _start(driver, tmp_path, 2 * run + 1, CODE) != importer
        assert _start(driver, tmp_path, 2 * run + 2, CODE) != importer
        assert _importer(packages, name) == importer


def _imports_and_trains(session: Any) -> int:
    import found_first  # noqa: F401
    import torch

    model, _ = session.prepare(torch.nn.Linear(1, 1), torch.optim.SGD, lr=0.1)
    data = session.loader(torch.utils.data.TensorDataset(torch.ones(4, 1)), 2)
    for _ in session.epochs(1):
        for (x,) in data:
            session.step(model(x).sum())
    return os.getpid()


@pytest.mark.slow
def test_the_first_member_tells_what_its_function_has_imported(driver: _Driver, packages: Path, tmp_path: Path) -> None:
    _write(packages, "found_first")
    options = SessionOptions("t", tmp_path / "t", code=CODE)
    driver.send(StartRun("t", 1, options, pack_training(_imports_and_trains, (), {}), Place(1, 0, 1), 60.0))
    told = driver.awaits(ModulesImported)
    assert told.code == CODE.identity
    assert "found_first" in unpack_files(told.payload)
    trained = deserialize(driver.awaits(RunEnded).payload)
    assert _importer(packages, "found_first", other_than=trained), "the next process of this slot imports it ahead"
