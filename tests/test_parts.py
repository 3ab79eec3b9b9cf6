"""The suite in parts: each test is in exactly one part, and the exit code covers all parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.__main__ import FAILED, NOTHING, PARTS, arguments_of, main, verdict
from tests.conftest import part_of


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


def test_on_one_core_tests_run_one_after_another():
    assert [arguments_of(part, 1) for part in PARTS] == [["--part", part] for part in PARTS]


def test_what_measures_runs_alone_on_any_machine():
    assert "-n" not in arguments_of("alone", 64)


def test_marks_tell_the_part():
    """`gpu` comes first, then `alone`, then `cluster`, `slurm` and `hosts`, then `slow`; others are quick."""

    def part(*marks):
        return part_of(SimpleNamespace(get_closest_marker=lambda name: name in marks))

    parts = [part(), part("gpu"), part("slow"), part("cluster"), part("slurm"), part("hosts", "slow")]
    assert parts == ["quick", "gpu", "slow", "daemons", "daemons", "daemons"]
    assert part("slurm", "alone") == "alone"
