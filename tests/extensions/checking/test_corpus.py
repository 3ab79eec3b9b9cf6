"""Every broken function is found by name and line; its mended twin holds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from freetrain_parsl.extensions.checking.report import CheckVerdict
from freetrain_parsl.extensions.checking.run import Checker, call_of
from tests.extensions.checking import corpus

if TYPE_CHECKING:
    from freetrain_parsl.extensions.checking.report import CheckReport, Finding

pytestmark = pytest.mark.slow


class Broken(NamedTuple):
    """A function of the corpus, and what the check must say."""

    function: str
    kind: str
    name: str
    marked: Any = None
    """What contains the marked line; ``None``: the function."""


BROKEN = [
    Broken("counter", "variable", "it"),
    Broken("patience", "variable", "best"),
    Broken("numbered", "variable", "i"),
    Broken("averaged", "variable", "average"),
    Broken("global_variable", "variable", "STEPS"),
    Broken("global_of_a_helper", "variable", "SEEN", corpus.count),
    Broken("attribute_of_the_model", "variable", "model", corpus.Annealed),
    Broken("attribute_of_a_trainer", "variable", "self", corpus.Trainer),
    Broken("closure", "variable", "it"),
    Broken("own_generator", "variable", "rng"),
    Broken("iterator", "variable", "numbers"),
    Broken("python_generator", "variable", "weights"),
    Broken("hidden", "variable", "h"),
    Broken("recent", "variable", "losses"),
    Broken("contrastive", "loss", "cross_entropy"),
    Broken("penalty", "loss", "norm"),
    Broken("rank_rate", "replicas", "lr of the optimizer"),
    Broken("noise", "replicas", "model.weight"),
    Broken("mean_buffer", "replicas", "model.mean"),
    Broken("unguarded_gradients", "error", ""),
    Broken("unseeded", "not repeatable", "model.weight"),
    Broken("skips_by_own_loss", "hang", ""),
    Broken("sharded", "variable", "it"),
]
MENDED = [name.removesuffix("_mended") for name in vars(corpus) if name.endswith("_mended")]
MENDED.remove("sharded")  # in a test of its own
HOLDS = ["checks_its_steps", "regression"]  # others in tests of their own


def checked(name: str, **arguments: Any) -> CheckReport:
    return Checker(call_of(getattr(corpus, name), **arguments)).run()


def marked_line(thing: Any) -> str:
    """Return ``file:line`` of the marked line in a function or class; empty if there is none."""
    lines, first = inspect.getsourcelines(thing)
    found = [first + number for number, line in enumerate(lines) if corpus.MARK in line]
    return f"{inspect.getsourcefile(thing)}:{found[0]}" if found else ""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.function)
def test_what_is_broken_is_named_with_its_line(broken: Broken) -> None:
    report = checked(broken.function)
    assert report.verdict is CheckVerdict.DIFFERS, str(report)
    found: Finding = report.causes[0]
    assert (found.kind, found.name) == (broken.kind, broken.name), str(report)
    if where := marked_line(broken.marked or getattr(corpus, broken.function)):
        assert found.where == where
        assert Path(where).name in found.text or broken.kind == "loss"
    assert found.mend
    assert [row for row in report.rows if row.holds is False]


@pytest.mark.parametrize("name", MENDED)
def test_what_is_mended_holds(name: str) -> None:
    """What a message says to do is enough; each mended function has a broken twin in the list."""
    assert name in {broken.function for broken in BROKEN}
    report = checked(f"{name}_mended")
    assert report.verdict is CheckVerdict.HOLDS, str(report)
    assert report.causes == []


@pytest.mark.parametrize("name", HOLDS)
def test_what_is_right_is_not_accused(name: str) -> None:
    report = checked(name)
    assert report.verdict is CheckVerdict.HOLDS, str(report)


def test_a_counter_that_is_only_printed_is_a_note() -> None:
    report = checked("only_printed")
    assert report.holds, str(report)
    (note,) = report.findings
    assert note.note
    assert note.name == "printed"
    assert "Note: `printed`" in str(report)


def test_a_variable_that_has_not_changed_in_so_few_steps_is_a_note() -> None:
    report = checked("patience_never_used")
    assert report.holds
    assert "`bad` (corpus.py:" in str(report)
    assert "was 0 at every step" in str(report)
    assert "session.state(bad=0)" in str(report)


def test_what_depends_on_the_share_by_design_is_said() -> None:
    report = checked("norm_and_dropout")
    assert report.holds, str(report)
    notes = " ".join(report.notes)
    assert "BatchNorm (1) normalizes over the share of each process" in notes
    assert "draws random numbers" in notes


def test_a_function_that_refuses_float64_is_checked_in_float32() -> None:
    report = checked("only_in_float32")
    assert report.holds
    assert any("It does not run in float64" in note for note in report.notes)


def test_processes_on_which_a_model_cannot_be_are_replaced_by_others() -> None:
    report = checked("sharded_evenly")
    assert report.holds, str(report)
    rows = {row.name: (row.holds, row.text) for row in report.rows}
    assert rows["2 processes"][0]
    assert rows["4 processes"][0]
    holds, text = rows["3 processes"]
    assert holds is None
    assert text.startswith("not allowed: 2.weight of a Sequential, of shape (3, 32), is sharded over its dimension 1")


def test_a_check_without_a_group_says_so() -> None:
    report = checked("sharded_evenly", width=11)
    assert [row.name for row in report.rows if row.holds is None] == [
        "2 processes",
        "a process that joins",
        "3 processes",
    ]
    assert any(
        "No group of processes was compared: the model allows none of 2, 3 processes." in note for note in report.notes
    )
    report = checked("sharded_in_pairs")
    assert report.failure == (
        "The check compares with one process, which the model does not allow: reshard_after_forward=2 needs a multiple "
        "of 2 (otherwise leave it out)."
    )


def test_a_model_that_computes_partly_in_float32_and_is_sharded_is_compared_in_the_first_step() -> None:
    report = checked("sharded_mended")
    assert report.verdict is CheckVerdict.HOLDS, str(report)
    assert report.causes == []
    assert [row.holds for row in report.rows] == [True] * 4
    assert "2 processes as one in the first step, and all alike" in " ".join(str(report).split())
    notes = " ".join(report.notes)
    assert "It computes partly in float32" in notes
    assert "is sharded over the processes. One that fails was not compared" in notes


def test_arguments_are_those_of_the_function() -> None:
    """Those that it accepts are in `test_check.py`."""
    with pytest.raises(TypeError, match=r"regression\(\).*the arguments after the session are: width"):
        checked("regression", wide=4)
