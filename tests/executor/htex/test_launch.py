"""The command that starts a node's worker pool, as a shell parses it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.htex.launch import Container, check_node_python, node_command
from freetrain_parsl.executor.run_directory import check_run_directory
from freetrain_parsl.interpreters import module_command

PILOT = module_command("freetrain_parsl.executor.slot.pilot")[1:]
POOL = module_command("freetrain_parsl.executor.htex.worker_pool")[1:]
SPECIAL = ["a b", "a;b", "$HOME", "`id`", "a'b", 'a"b', "a\nb", "a\\b", "a|b", "a>b", "{debug}", "", "a*"]


def words(*arguments) -> list[str]:
    """Split the command into words, up to HTEX's own arguments."""
    command = shlex.split(node_command(*arguments))
    return command[: command.index(POOL[-1]) + 1]


def test_without_settings_the_nodes_run_the_drivers_interpreter() -> None:
    assert words(None, None, ()) == ["exec", sys.executable, *PILOT, sys.executable, *POOL]


def test_another_module_may_start_the_pilot() -> None:
    starter = module_command("a.module")[1:]
    assert words("python", None, (), "a.module") == ["exec", "python", *starter, "python", *PILOT, "python", *POOL]


def test_a_name_is_left_to_the_path_that_worker_init_makes() -> None:
    assert words("python", None, ()) == ["exec", "python", *PILOT, "python", *POOL]


def test_a_container_sees_the_run_directory_and_the_checkpoints() -> None:
    container = Container("/i/torch.sif", binds=("/data:/data:ro",), options=("--nv",))
    assert words("python", container, (Path("/run"), Path("/ckpt"))) == [
        *("exec", "apptainer", "exec", "--nv", "--bind=/run", "--bind=/ckpt", "--bind=/data:/data:ro", "/i/torch.sif"),
        *("python", *PILOT, "python", *POOL),
    ]


def test_a_containers_own_python_is_the_default_in_it() -> None:
    assert words(None, Container("/i.sif"), ())[-5:] == [*PILOT, "python3", *POOL]


@pytest.mark.parametrize("word", SPECIAL)
def test_nothing_that_is_special_to_a_shell_is_put_into_the_command(word) -> None:
    """Launchers put the command into here-documents, where quotes do not protect."""
    with pytest.raises(InvalidSettings, match="may hold"):
        check_node_python(word)
    for settings in ({"image": word}, {"command": word}, {"binds": (word,)}, {"options": (f"--x={word}",)}):
        if word or "options" not in settings:
            with pytest.raises(InvalidSettings, match="may hold"):
                Container(**{"image": "/i.sif", **settings})


def test_several_directories_in_one_bind_are_refused() -> None:
    """Apptainer treats a comma as a separator."""
    with pytest.raises(InvalidSettings, match="as a separate item"):
        Container("/i.sif", binds=("/a,/b",))


def test_a_word_that_would_be_taken_for_the_image_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="--name=value"):
        Container("/i.sif", options=("--env", "A"))


def test_a_directory_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(InvalidSettings, match="my run"):
        node_command(None, Container("/i.sif"), (Path("/my run"),))


def test_an_interpreter_of_any_name_is_quoted(monkeypatch, tmp_path) -> None:
    """The user cannot choose the driver's own path."""
    python = tmp_path / "it's {my} python"
    python.write_text('#!/bin/sh\necho "$0"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    command = node_command(None, None, ()).partition(" {debug}")[0].format()
    assert subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True).stdout == f"{python}\n"


@pytest.mark.parametrize("word", [word for word in SPECIAL if word])
def test_a_run_directory_that_shells_would_change_is_refused(word) -> None:
    """Parsl puts it unquoted into job scripts, so every block would fail."""
    with pytest.raises(InvalidSettings, match=r"run directory .* may hold"):
        check_run_directory(Path("/runs") / word)
    check_run_directory(Path("/home/zoë/runs~1/a-b_c.d"))
