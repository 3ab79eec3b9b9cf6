"""The suite in parts: each test is in exactly one part, and the exit code covers all parts."""

from __future__ import annotations

import gc
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.__main__ import FAILED, NOTHING, PARTS, arguments_of, main, verdict
from tests.conftest import may_have, part_of, pytest_collection, pytest_collection_modifyitems


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0, 0], 0),
        ([0, NOTHING, NOTHING], 0),
        ([NOTHING, NOTHING, NOTHING], NOTHING),
        ([NOTHING, 0, FAILED], FAILED),
        ([FAILED, 0, NOTHING], FAILED),
        ([NOTHING, 2], 2),
        ([0, -9], -9),
    ],
)
def test_a_part_without_tests_is_no_failure_unless_all_are(codes, code):
    assert verdict(codes) == code


@pytest.mark.parametrize(
    ("codes", "calls"), [([0, NOTHING, 0, 0, NOTHING], 5), ([FAILED, 0, 0, 0, 0], 5), ([2], 1), ([NOTHING, 4], 2)]
)
def test_what_follows_a_failed_test_runs_but_not_what_follows_an_interruption(codes, calls, monkeypatch):
    asked = []

    class Done:
        @property
        def returncode(self):
            return codes[len(asked) - 1]

    monkeypatch.setattr("subprocess.run", lambda command, check: asked.append(command) or Done())
    assert main(["-k", "x"]) == verdict(codes)
    assert len(asked) == calls
    assert all(command[-2:] == ["-k", "x"] for command in asked)


def workers_of(part, cores):
    """Return how many tests of a part run at a time."""
    arguments = arguments_of(part, cores)
    assert arguments[:2] == ["--part", part]
    return int(arguments[arguments.index("-n") + 1]) if "-n" in arguments else 1


def test_tests_that_compute_have_a_core_each_and_two_that_wait_for_daemons_share_one():
    assert [workers_of(part, 1) for part in ("quick", "slow", "daemons")] == [1, 1, 2]
    assert [workers_of(part, 2) for part in ("quick", "slow", "daemons")] == [2, 2, 4]
    assert all(workers_of(part, 64) <= 4 for part in PARTS)


def test_what_measures_has_a_core_of_its_own():
    assert [workers_of("timed", cores) for cores in (1, 2, 64)] == [1, 2, 2]


def test_marks_tell_the_part():
    """`gpu` comes first, then `timed`, then `cluster`, `slurm` and `hosts`, then `slow`; others are quick."""

    def part(*marks):
        return part_of(SimpleNamespace(get_closest_marker=lambda name: name in marks))

    parts = [part(), part("gpu"), part("slow"), part("cluster"), part("slurm"), part("hosts", "slow")]
    assert parts == ["quick", "gpu", "slow", "daemons", "daemons", "daemons"]
    assert part("slurm", "timed") == "timed"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1", ["quick"]),
        ("@pytest.{}.slow", ["quick", "slow"]),
        ("pytestmark = pytest.{}.slow", ["slow"]),
        ("pytestmark = [\n    pytest.{}.filterwarnings('x[1]'),\n    pytest.{}.slow,\n]", ["slow"]),
        ("pytestmark = pytest.{}.cold\n\n@pytest.{}.slow", ["quick", "slow"]),
    ],
)
def test_a_file_is_collected_for_the_parts_that_its_tests_may_be_in(tmp_path, text, parts):
    """Marks are written in parts here, because this file has no such tests."""
    file = tmp_path / "test_x.py"
    file.write_text(text.format("mark", "mark"))
    assert [part for part in PARTS if may_have(part, file)] == parts
    (tmp_path / "conftest.py").write_text("marks=pytest." + "mark.hosts")
    assert [part for part in PARTS if may_have(part, file)] == [*parts, "daemons"]


def test_a_test_that_no_part_would_collect_is_an_error_when_the_quick_part_runs(tmp_path):
    item = SimpleNamespace(path=tmp_path / "test_x.py", nodeid="test_x", get_closest_marker=lambda name: name == "slow")
    item.path.touch()
    with pytest.raises(pytest.UsageError, match="no part would run test_x: write its mark in its file"):
        pytest_collection_modifyitems(SimpleNamespace(), [item])


@pytest.mark.parametrize("no_bytecode", [True, False])
def test_compiled_tests_are_kept_whatever_the_environment_says_of_other_files(monkeypatch, no_bytecode):
    monkeypatch.setattr("gc.freeze", lambda: None)  # else what other tests have left is never collected
    monkeypatch.setattr(sys, "dont_write_bytecode", no_bytecode)
    with closing(pytest_collection()) as collection:
        next(collection)
        assert not sys.dont_write_bytecode
        assert not gc.isenabled()
    assert sys.dont_write_bytecode is no_bytecode
    assert gc.isenabled()
