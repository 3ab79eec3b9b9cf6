"""`freetrain checkpoints ls`, `verify` and `prune` on directories with intact and damaged checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from freetrain_parsl.cli.commands import app
from freetrain_parsl.storage.posix import CheckpointDirectory

FACTS = {"epoch": 2, "reason": "periodic", "written": "2026-01-02T03:04:05.678+00:00", "world_size": 3, "code": "a:b#1"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a run directory: four checkpoints of one training job, one of another with an odd name."""
    root = tmp_path / "run" / "checkpoints"
    for training, steps in (("net", (10, 20, 30, 40)), ("a/b c", (7,))):
        directory = CheckpointDirectory(root, training)
        directory.open()
        for step in steps:
            directory.publish(step, lambda sink: sink.write(bytes(2500)), FACTS)
        directory.close()
    return tmp_path / "run"


def freetrain(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], env={"COLUMNS": "160"})


def damage(root: Path, step: int, how: str = "flipped") -> Path:
    state = root / "checkpoints" / "net" / f"step-{step:010d}" / "state.pt"
    data = bytearray(state.read_bytes())
    data[5] ^= 1
    state.write_bytes(data if how == "flipped" else data[:100])
    return state.parent


def steps(root: Path) -> list[int]:
    return [entry.step for entry in CheckpointDirectory(root / "checkpoints", "net").entries()]


def test_ls_shows_all_checkpoints_of_a_run(root: Path) -> None:
    shown = freetrain("ls", root)
    assert shown.exit_code == 0
    rows = [line.split() for line in shown.stdout.splitlines() if "periodic" in line]
    assert [row[-9:-4] for row in rows][1:] == [["net", str(step), "2", "2.5", "kB"] for step in (40, 30, 20, 10)]
    assert rows[0][:3] == ["a/b", "c", "7"]
    assert {row[-1] for row in rows} == {"yes"}


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/net"])
def test_a_run_its_checkpoints_and_one_training_may_be_named(root: Path, place: str) -> None:
    rows = json.loads(freetrain("ls", root / place, "--json").stdout)
    assert [row["step"] for row in rows if row["training"] == "net"] == [40, 30, 20, 10]
    newest = rows[-4]
    assert newest.pop("path").endswith("step-0000000040")
    expected = {**FACTS, "training": "net", "step": 40, "bytes": 2500, "complete": True, "problem": None}
    assert newest == expected


def test_without_a_directory_it_is_the_one_here(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert len(json.loads(freetrain("ls", "--json").stdout)) == 5


def test_ls_tells_what_is_cut_off_and_verify_what_is_changed_too(root: Path) -> None:
    cut, changed = damage(root, 20, "cut"), damage(root, 40)
    assert [row["step"] for row in json.loads(freetrain("ls", root, "--json").stdout) if not row["complete"]] == [20]
    found = freetrain("verify", root, "--json")
    assert found.exit_code == 1
    assert {row["path"]: row["problem"] for row in json.loads(found.stdout) if not row["intact"]} == {
        str(cut): f"damaged checkpoint {cut}: state.pt has 100 of 2500 bytes",
        str(changed): f"damaged checkpoint {changed}: state.pt does not match its SHA-256",
    }
    text = freetrain("verify", root)
    assert text.exit_code == 1
    assert f"damaged checkpoint {changed}: state.pt does not match its SHA-256\n" in text.stdout


def test_a_checkpoint_without_a_manifest_is_shown_as_damaged(root: Path) -> None:
    (root / "checkpoints" / "net" / "step-0000000030" / "manifest.json").unlink()
    assert "step-0000000030: unreadable manifest.json" in freetrain("ls", root).stdout


def test_verify_is_content_if_all_are_intact(root: Path) -> None:
    assert freetrain("verify", root).exit_code == 0


def test_prune_removes_what_is_older_than_the_newest_ones(root: Path) -> None:
    said = freetrain("prune", root, "--keep", 1)
    assert said.exit_code == 0
    assert steps(root) == [40]
    assert said.stdout.count("removed /") == 3
    assert "3 checkpoints, 7.5 kB, removed" in said.stdout
    assert not list(root.rglob(".tmp-*"))


def test_a_damaged_checkpoint_does_not_count_as_kept(root: Path) -> None:
    damage(root, 40)
    freetrain("prune", root, "--keep", 1)
    assert steps(root) == [40, 30]


def test_if_none_is_intact_nothing_goes(root: Path) -> None:
    for step in (10, 20, 30, 40):
        damage(root, step)
    freetrain("prune", root, "--keep", 1)
    assert steps(root) == [40, 30, 20, 10]


def test_a_dry_run_and_other_trainings_change_nothing(root: Path) -> None:
    assert "would remove" in freetrain("prune", root, "--keep", 2, "--dry-run").stdout
    assert "0 checkpoints" in freetrain("prune", root, "--keep", 2, "--training", "a/b c").stdout
    assert steps(root) == [40, 30, 20, 10]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere is not a directory"),
        (("verify", "."), "there are no checkpoints in"),
        (("prune", "run"), "at least 1, e.g. --keep 2"),
        (("prune", "run", "--keep", "0"), "at least 1, e.g. --keep 2"),
        (("prune", "run", "--keep", "1", "--training", "nat"), "no training job 'nat' here (did you mean 'net'?)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    root: Path, arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    (root.parent / "empty").mkdir()
    if arguments[1] == ".":
        monkeypatch.chdir(root.parent / "empty")
    result = freetrain(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert steps(root) == [40, 30, 20, 10]


def test_the_commands_page_has_exactly_the_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    section = page.split("## `freetrain checkpoints`\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"^\| `(\w+)` \| `(--[\w-]+)` \|", section, re.MULTILINE))
    group = typer.main.get_command(app).commands["checkpoints"]  # type: ignore[attr-defined]  # it is a group
    options = {
        (verb, name)
        for verb, command in group.commands.items()
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--")
    }
    assert documented == options
