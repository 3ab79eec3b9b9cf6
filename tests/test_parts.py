"""The suite in parts: each test is in exactly one part, and the exit code covers all parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.__main__ import FAILED, NOTHING, PARTS, main, verdict
from tests.conftest import first_and_last, may_have, part_of, pytest_collection_modifyitems


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, NOTHING, NOTHING], 0),
        ([NOTHING, NOTHING, NOTHING], NOTHING),
        ([NOTHING, 0, FAILED], FAILED),
        ([FAILED, 0, NOTHING], FAILED),
        ([0, -9], -9),
    ],
)
def test_a_part_without_tests_is_no_failure_unless_all_are(codes, code):
    assert verdict(codes) == code


@pytest.mark.parametrize(("codes", "calls"), [([FAILED, *(0 for _ in PARTS)], len(PARTS)), ([NOTHING, 2], 2)])
def test_what_follows_a_failed_test_runs_but_not_what_follows_an_interruption(codes, calls, monkeypatch):
    asked = []

    def popen(command, **options):
        asked.append(command)
        return SimpleNamespace(wait=iter(codes[len(asked) - 1 :]).__next__)

    monkeypatch.setattr("subprocess.Popen", popen)
    assert main(["--all", "-k", "x"]) == verdict(codes[:calls])
    assert len(asked) == calls
    assert all(command[-2:] == ["-k", "x"] for command in asked)
    asked.clear()
    main([])
    assert all(command[-1] == "--smoke" for command in asked)


def marked(tmp_path, *marks):
    return SimpleNamespace(
        path=tmp_path / "test_x.py", nodeid="test_x", get_closest_marker=lambda name: name if name in marks else None
    )


def test_marks_tell_the_part(tmp_path):
    """A test with several marks is in the first of their parts; one without is quick."""
    marks = [(), ("gpu",), ("slow",), ("cluster",), ("hosts", "slow"), ("slurm", "timed"), ("timed", "gpu")]
    parts = [part_of(marked(tmp_path, *found)) for found in marks]
    assert parts == ["quick", "gpu", "slow", "daemons", "daemons", "timed", "gpu"]


@pytest.mark.parametrize(
    ("text", "parts", "smoke"),
    [
        ("x = 1", ["quick"], ["quick"]),
        ("@pytest.{}.slow", ["quick", "slow"], ["quick"]),
        ("@pytest.{}.slow\n@pytest.{}.smoke", ["quick", "slow"], ["quick", "slow"]),
        ("pytestmark = [\n    pytest.{}.filterwarnings('x[1]'),\n    pytest.{}.slow,\n]", ["slow"], []),
        ("pytestmark = pytest.{}.cold\n\n@pytest.{}.slow", ["quick", "slow"], ["quick"]),
    ],
)
def test_a_file_is_collected_for_the_parts_that_its_tests_may_be_in(tmp_path, text, parts, smoke):
    """Marks are written in parts here, because this file has no such tests."""
    file = tmp_path / "test_x.py"
    file.write_text(text.format("mark", "mark"))
    assert {part for part in PARTS if may_have(part, file)} == {*parts}
    assert {part for part in PARTS if may_have(part, file, smoke=True)} == {*smoke}
    (tmp_path / "conftest.py").write_text("marks=pytest." + "mark.hosts")
    assert {part for part in PARTS if may_have(part, file)} == {*parts, "daemons"}


def test_a_test_that_no_part_would_collect_is_an_error_when_the_quick_part_runs(tmp_path):
    item = marked(tmp_path, "slow")
    item.path.touch()
    with pytest.raises(pytest.UsageError, match="no part would run test_x: write its mark in its file"):
        pytest_collection_modifyitems(SimpleNamespace(), [item])


@pytest.mark.parametrize("smoke", [True, False])
def test_the_smaller_set_has_all_quick_tests_and_of_the_others_those_marked(tmp_path, smoke):
    (tmp_path / "test_x.py").write_text("".join(f"@pytest.{'mark'}.{name}\n" for name in ("slow", "smoke", "gpu")))
    items = [marked(tmp_path, *marks) for marks in [(), ("slow",), ("slow", "smoke"), ("gpu",)]]
    deselected = []

    def pytest_deselected(items):
        deselected.extend(items)

    hook = SimpleNamespace(pytest_deselected=pytest_deselected)
    unwanted = items[1:2] if smoke else []
    options = {"--part": None, "--smoke": smoke, "--few": False}
    config = SimpleNamespace(getoption=options.get, hook=hook)
    left = list(items)
    pytest_collection_modifyitems(config, left)
    assert (left, deselected) == ([item for item in items if item not in unwanted], unwanted)


def test_few_instances_are_the_first_and_the_last_one_of_each_test_of_each_class():
    ids = ["a.py::t[1]", "a.py::t[x[2]]", "a.py::t[3]", "a.py::u", "a.py::C::t[1]", "a.py::D::t[1]", "a.py::D::t[2]"]
    left = first_and_last([SimpleNamespace(nodeid=one) for one in ids])
    assert [item.nodeid for item in left] == [one for one in ids if one != "a.py::t[x[2]]"]
