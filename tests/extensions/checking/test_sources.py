"""What a function's source says about its variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.extensions.checking.records import Frame
from freetrain_parsl.extensions.checking.sources import Source, last_assignment, last_assignment_of_global, line_of

if TYPE_CHECKING:
    from pathlib import Path

TEXT = """\
class One:
    def call(self):
        self.calls = 1

class Other:
    def call(self):
        self.calls += 1

def outside():
    global COUNT
    COUNT = 2

def train(session, data):
    it, best = 0, 1e9
    seen = []
    for epoch in session.epochs(4):
        total = 0
        for i, (x, y) in enumerate(data):
            with scope():
                factor = 1 / (1 + it)
            if epoch:
                late = i
            loss = factor * model(x)
            session.step(loss)
            it += 1
            total += loss.item()
            seen.append(total)
        session.log(total=total)
        if total > best:
            break
        best = total
        if late > 3:
            optimizer.param_groups[0]["lr"] = late
    return it
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "module.py"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def source(file: str) -> Source:
    return Source(Frame("train", file, 13))


@pytest.mark.parametrize(
    ("name", "line", "initial", "in_loop", "carried", "counts"),
    [
        ("it", 25, "0", True, True, False),
        ("best", 31, "1e9".replace("1e9", "1000000000.0"), True, True, False),
        ("total", 26, "", True, True, False),
        ("factor", 20, "", True, False, False),
        ("late", 22, "", True, True, False),
        ("i", 18, "", True, False, True),
        ("seen", 15, "[]", False, False, False),
        ("nowhere", 0, "", False, False, False),
    ],
)
def test_a_variable(
    source: Source, name: str, line: int, initial: str, in_loop: bool, carried: bool, counts: bool
) -> None:
    """A round of the loop may read what an earlier one left: `late` is not assigned in each."""
    found = source.look_up(name)
    assert (found.line, found.initial) == (line, initial)
    assert (found.in_loop, found.carried, found.counts) == (in_loop, carried, counts)


@pytest.mark.parametrize(
    ("name", "reached"),
    [
        ("it", {"the loss": 24, "when the loop is left": 29, "session.log": 28, "the returned value": 34}),
        ("late", {"the learning rate": 33}),
        ("seen", {}),
    ],
)
def test_what_a_variable_reaches(source: Source, name: str, reached: dict[str, int]) -> None:
    uses = {use.what: use.line for use in source.uses(name)}
    assert reached.items() <= uses.items()
    assert bool(uses) == bool(reached)


def test_attributes_are_sought_in_their_class_and_globals_in_functions(file: str) -> None:
    assert last_assignment([file], "calls", {"self"}, "One") == f"{file}:3"
    assert last_assignment([file], "calls", {"self"}, "Other") == f"{file}:7"
    assert last_assignment([file], "calls", {"model"}, "One") == ""
    assert last_assignment_of_global([file], "COUNT") == f"{file}:11"


def test_a_source_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    source = Source(Frame("train", str(tmp_path / "gone.py"), 1))
    assert not source.known
    assert source.uses("it") == []
    assert source.look_up("it").line == 0
    assert line_of(f"{tmp_path / 'gone.py'}:3") == ""
