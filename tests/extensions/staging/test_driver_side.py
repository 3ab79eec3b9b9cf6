"""The driver's side of images, without processes: when there is one, what a block gets, and what is learned."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from freetrain_parsl import FreeTrainExecutor
from freetrain_parsl.errors import InvalidSettings
from freetrain_parsl.executor.slot.loaded_files import pack_files
from freetrain_parsl.extensions.staging import start as staging
from freetrain_parsl.extensions.staging.make import facts_of, learned_path, read_learned
from freetrain_parsl.extensions.staging.start import ImageStart, _Made, file_system_of, is_shared
from freetrain_parsl.protocol.messages import Hello

if TYPE_CHECKING:
    from pathlib import Path

HASH = "0" * 64


@pytest.fixture
def world(tmp_path: Path, monkeypatch) -> Path:
    """Return a directory with an environment, a base and a cache of images."""
    for name in ("env/lib/a.py", "env/lib/b.py", "base/lib/a.py", "base/lib/c.py", "project/mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "cache/freetrain/images").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def made_in(world: Path, **changes: Any) -> _Made:
    """Return an image with ``lib/a.py``."""
    return _Made(
        **{
            "path": world / f"image-{HASH}.tar.gz",
            "bytes": 150_000_000,
            "packed": 50_000_000,
            "traced": frozenset({"lib/a.py"}),
            "trees": ((str(world / "base"), ""), (str(world / "env"), "")),
            "prefix": str(world / "env"),
            "checks": (tuple(facts_of(str(world / "env/lib/a.py"))),),
            **changes,
        }
    )


@pytest.fixture
def image(world: Path) -> ImageStart:
    """Return what starts nodes from that image, without a thread."""
    start = ImageStart("always", sys.executable)
    start._directory, start._made, start._wanted = world, made_in(world), True
    return start


def test_a_block_gets_the_image_with_its_hash(image: ImageStart, world: Path) -> None:
    words = image.words(1)
    assert words[:3] == ("/bin/bash", f"{world}/start.sh", f"{world}/image-{HASH}.tar.gz")
    assert words[3:] == ("150000000", "0.00", sys.executable)
    assert shlex.join(words) == " ".join(words), "launchers put them into here-documents"


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 0.0), (100, 1.0), (1000, 10.0), (100_000, 30.0)])
def test_nodes_of_a_large_block_do_not_read_at_the_same_moment(image: ImageStart, nodes: int, seconds: float) -> None:
    assert float(image.words(nodes)[4]) == pytest.approx(seconds)


def test_without_an_image_a_block_starts_as_ever(image: ImageStart) -> None:
    image._made = None
    assert image.words(1) == ()
    assert image.preparation(4, "slurm") == ""


def test_what_was_edited_is_not_taken_from_the_image(image: ImageStart, world: Path, caplog) -> None:
    (world / "env/lib/a.py").write_text("VALUE = 1", encoding="utf-8")
    with caplog.at_level(logging.INFO):
        assert image.words(1) == ()
    assert f"{world}/env/lib/a.py has changed" in caplog.text
    assert image._tasks.get_nowait() == "make"


def test_slurm_sends_the_image_to_the_nodes_of_a_block(image: ImageStart, world: Path) -> None:
    there = f"/tmp/freetrain-{os.getuid()}-image-{HASH}.tar.gz"
    assert f"sbcast --force {world}/image-{HASH}.tar.gz {there}" in image.preparation(2, "slurm")
    assert image.preparation(1, "slurm") == image.preparation(2, "embedded") == ""


def test_a_name_that_a_script_would_change(image: ImageStart, world: Path, caplog) -> None:
    image._directory = world / "a b"
    assert image.words(1) == ()
    assert "would need quotes" in caplog.text


def hello(node: str = "n0", **how: Any) -> Hello:
    """Return a slot's introduction."""
    return Hello("t", node, "b", 1, **how)


def test_a_node_without_its_image_is_told_once(image: ImageStart, caplog) -> None:
    assert image.started(hello(image_fault="no room")) == "no room"
    assert image.started(hello(image_fault="no room")) == ""
    assert image.started(hello("n1", image_fault="no room")) == "no room", "of another node, in the journal"
    assert caplog.text.count("no room") == 1
    assert image.words(1)


def test_an_image_that_no_node_can_use_is_given_up(image: ImageStart, caplog) -> None:
    for node in ("n0", "n1", "n2"):
        image.started(hello(node, image_fault="no room"))
    assert image.words(1) == ()
    assert "further blocks start without it" in caplog.text


def test_an_image_that_works_on_some_nodes_is_kept(image: ImageStart) -> None:
    image.started(hello("good", image="image-0"))
    for node in ("n0", "n1", "n2"):
        image.started(hello(node, image_fault="no room"))
    assert image.words(1)


@pytest.mark.parametrize(("waited", "wanted"), [(2.0, False), (20.0, True)])
def test_imports_that_wait_long_for_files_want_an_image(world: Path, monkeypatch, waited: float, wanted: bool) -> None:
    start = ImageStart("auto", sys.executable)
    made: list[str] = []
    monkeypatch.setattr(start, "_want", made.append)
    assert start.started(hello(waited=waited)) == ""
    assert bool(made) is wanted


@pytest.mark.parametrize(("kind", "wanted"), [("ext4", False), ("nfs4", True), ("lustre", True), ("", False)])
def test_a_shared_file_system_wants_an_image(world: Path, monkeypatch, kind: str, wanted: bool) -> None:
    monkeypatch.setattr(staging, "file_system_of", lambda _: kind)
    monkeypatch.setattr(ImageStart, "_work", lambda _: None)  # before its thread is created
    start = ImageStart("auto", sys.executable)
    assert start.begin(world / "start") is wanted
    start.close()


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\nserver:/home {tmp_path}/ho\\040me nfs4 rw 0 0\nx {tmp_path}/h lustre rw 0 0\n",
        "utf-8",
    )
    assert file_system_of(f"{tmp_path}/ho me/env", mounts) == "nfs4"
    assert file_system_of(f"{tmp_path}/home", mounts) == "ext4"
    assert is_shared("nfs4")
    assert not is_shared("ext4")


def test_an_interpreter_that_is_not_here(world: Path, caplog) -> None:
    start = ImageStart("always", "python")
    assert start.begin(world / "start") is False
    assert "not an interpreter of this host" in caplog.text
    start.close()


def test_an_executor_knows_four_choices(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="node_image must be one of auto, off, always, full, got 'on'"):
        FreeTrainExecutor(node_image="on", checkpoint_dir=tmp_path)


def test_what_a_node_had_to_read_elsewhere_is_learned(image: ImageStart, world: Path) -> None:
    inside = f"/dev/shm/freetrain-1000/image-{HASH}/"
    loaded = {
        f"{inside}lib/a.py",  # copied
        f"{inside}lib/b.py",  # by a link to the environment
        f"{inside}lib/c.py",  # by a link to the base
        f"{inside}lib/absent.py",
        f"{world}/env/lib/b.py",  # the same, as the loader names it
        f"{world}/project/mine.py",
        "/usr/lib/x86_64-linux-gnu/libc.so.6",
    }
    assert image._take(pack_files(loaded))
    path = learned_path(image._cache, image._made.trees)  # type: ignore[union-attr]
    expected = [world / "base/lib/c.py", world / "env/lib/b.py", world / "project/mine.py"]
    assert read_learned(path) == sorted(map(str, expected))
    assert not image._take(pack_files(loaded)), "it is known"


@pytest.mark.parametrize("payload", [b"", b"damaged", pack_files({"x" * (9 << 20)})])
def test_a_damaged_message_is_only_said(image: ImageStart, payload: bytes, caplog) -> None:
    assert not image._take(payload)
    assert payload == b"" or "is not noted" in caplog.text


def test_no_image_can_be_made(world: Path, monkeypatch, caplog) -> None:
    """The reason is told, and nodes start without."""
    start = ImageStart("always", sys.executable)
    monkeypatch.setattr(staging, "module_command", lambda _module, python: [python, "-c", "raise SystemExit('no')"])
    assert start.begin(world / "start")
    end = time.monotonic() + 60
    while "there is no image" not in caplog.text and time.monotonic() < end:
        time.sleep(0.05)
    assert "nodes start without: no" in caplog.text
    assert start.words(1) == ()
    start.close()
    assert not (world / "start").exists()
    assert not start._thread.is_alive()


@pytest.mark.parametrize(("choice", "least", "most"), [("always", 1 << 20, 1 << 30), ("full", 1 << 34, 1 << 60)])
def test_only_a_full_image_has_large_libraries(world: Path, monkeypatch, choice: str, least: int, most: int) -> None:
    start = ImageStart(choice, sys.executable)
    say = f"import sys; sys.exit(str({least} < int(sys.argv[-1]) < {most}))"
    monkeypatch.setattr(staging, "module_command", lambda _module, python: [python, "-c", say])
    start._directory = world / "start"
    with pytest.raises(ValueError, match="True"):
        start._make()
