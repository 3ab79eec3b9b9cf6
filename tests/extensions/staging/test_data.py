"""Copies of users' files on a node: once for all, within bounds, and never another content than was submitted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl import run_local, training_app
from freetrain_parsl.errors import InvalidApp, UsageError
from freetrain_parsl.executor.slot import pilot
from freetrain_parsl.extensions.staging import data
from freetrain_parsl.extensions.staging.data import NodeCopies
from freetrain_parsl.training.data.staging import local_path
from tests.small_disk import small_disk

if TYPE_CHECKING:
    from freetrain_parsl.protocol.options import SessionOptions, StagedPath

HOLD = (
    "import sys; from freetrain_parsl.extensions.staging.data import NodeCopies;"
    "from freetrain_parsl.protocol.options import StagedPath;"
    "print(NodeCopies.local(StagedPath(*sys.argv[1:4], int(sys.argv[4]))), flush=True); sys.stdin.read()"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the local directory of a node, on which no copy is held."""
    monkeypatch.setattr(NodeCopies, "_held", {})
    monkeypatch.setattr(data, "pool_directory", lambda: None)
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("FREETRAIN_IMAGE_PLACES", str(tmp_path / "local"))
    return tmp_path / "local"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's directory, which is the current one."""
    (tmp_path / "shared/parts/deep").mkdir(parents=True)
    (tmp_path / "shared/train.npz").write_bytes(b"x" * 1000)
    (tmp_path / "shared/parts/deep/0").write_bytes(b"0")
    (tmp_path / "shared/parts/1").symlink_to("../train.npz")
    monkeypatch.chdir(tmp_path / "shared")
    return tmp_path / "shared"


def submitted(*names: str) -> SessionOptions:
    """Return the options of a training job that stages these."""

    @training_app(stage=list(names))
    def train(session):
        return None

    return train.call_request((), {}).options


def holder(path: StagedPath) -> subprocess.Popen[str]:
    """Use a copy in another process."""
    command = [sys.executable, "-c", HOLD, path.name, path.path, path.key, str(path.size)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def let_go(name: str) -> None:
    """Close this process's lock on a copy, as its end does."""
    (lock,) = [fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).endswith(name)]
    os.close(int(lock.name))


def test_a_file_is_read_from_a_copy_which_later_callers_find(shared: Path, place: Path) -> None:
    options = submitted("train.npz")
    copy = local_path("./train.npz", options)
    assert copy.is_relative_to(place)
    assert copy.name == "train.npz", "functions look at suffixes"
    assert copy.read_bytes() == (shared / "train.npz").read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o400
    (shared / "train.npz").unlink()
    NodeCopies._held.clear()  # as in another process
    assert local_path("train.npz", options) == copy, "nothing is read where it is"


def test_a_directory_is_copied_with_what_its_links_lead_to(shared: Path, place: Path) -> None:
    copy = local_path("parts", submitted("parts"))
    assert sorted(str(file.relative_to(copy)) for file in copy.rglob("*")) == ["1", "deep", "deep/0"]
    assert (copy / "1").read_bytes() == b"x" * 1000


def test_another_content_is_another_copy(shared: Path, place: Path) -> None:
    first = local_path("train.npz", submitted("train.npz"))
    (shared / "train.npz").write_bytes(b"y" * 1000)
    second = local_path("train.npz", submitted("train.npz"))
    assert (first.read_bytes()[:1], second.read_bytes()[:1]) == (b"x", b"y")


def test_what_has_changed_since_is_read_where_it_is(shared: Path, place: Path, capfd: pytest.CaptureFixture) -> None:
    options = submitted("train.npz")
    (shared / "train.npz").write_bytes(b"longer" * 1000)
    for _ in range(2):
        assert local_path("train.npz", options) == shared / "train.npz"
    assert capfd.readouterr().err.count("it has changed since its training job was submitted") == 1
    assert [entry.name for entry in (place / f"freetrain-{os.getuid()}").iterdir()] == ["data.lock"]


def test_a_missing_file_is_refused_at_submission(shared: Path) -> None:
    with pytest.raises(InvalidApp, match=rf"there is no {shared}/tran.npz \(tran.npz, looked up in {shared}\)"):
        submitted("tran.npz")


@pytest.mark.parametrize("stage", ["train.npz", [3], [b"x"], ["a\nb"], 5])
def test_a_stage_that_is_no_list_of_names_is_refused(stage: object) -> None:
    with pytest.raises(InvalidApp, match="stage"):
        training_app(stage=stage)(lambda session: None)


def test_a_directory_of_too_many_files_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MOST_FILES", 1)
    with pytest.raises(InvalidApp, match="more than 1 files: pack them"):
        submitted("parts")


def test_a_name_that_is_not_staged(shared: Path, place: Path) -> None:
    with pytest.raises(UsageError, match=r"session.staged\('other'\): the app stages train.npz"):
        local_path("other", submitted("train.npz"))


def test_alone_the_path_itself_is_read(shared: Path, place: Path) -> None:
    @training_app(stage=["train.npz"])
    def train(session):
        return session.staged("train.npz")

    assert run_local(train) == shared / "train.npz"
    assert run_local(train.func) == Path("train.npz")
    assert list(place.iterdir()) == []


def test_without_room_the_path_itself_is_read(
    shared: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (shared / "train.npz").write_bytes(b"x" * (7 << 20))
    options = submitted("train.npz")
    with small_disk(tmp_path / "full", "8m") as disk:
        monkeypatch.setenv("FREETRAIN_IMAGE_PLACES", str(disk))
        assert local_path("train.npz", options) == shared / "train.npz"
    assert "MB free, for 7 MB" in capfd.readouterr().err


def test_what_nobody_uses_makes_room(
    shared: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (shared / name).write_bytes(name.encode() * (3 << 20))
    a, b, c = (submitted(name).stage[0] for name in "abc")  # type: ignore[index]
    with small_disk(tmp_path / "small", "8m") as disk:
        monkeypatch.setenv("FREETRAIN_IMAGE_PLACES", str(disk))
        using = holder(a)
        assert using.stdout is not None
        assert using.stdout.readline().startswith(str(disk))
        before = holder(b)
        before.communicate(timeout=60)
        assert NodeCopies.local(c).is_relative_to(disk)
        kept = {entry.name for entry in (disk / f"freetrain-{os.getuid()}").glob("data-*")}
        assert kept == {f"data-{a.key}", f"data-{c.key}"}
        using.communicate(timeout=60)
        let_go(f"data-{c.key}")


def test_a_squatted_directory_is_not_used(shared: Path, place: Path, capfd: pytest.CaptureFixture) -> None:
    (place / f"freetrain-{os.getuid()}").mkdir(mode=0o755)
    assert local_path("train.npz", submitted("train.npz")) == shared / "train.npz"
    assert "is not a private directory of this user" in capfd.readouterr().err


def test_others_wait_while_one_makes_the_copy(shared: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = submitted("train.npz").stage or ()
    made: list[Path] = []
    copy = data._copy

    def slow(source: str, to: Path) -> None:
        made.append(to)
        time.sleep(0.5)
        copy(source, to)

    monkeypatch.setattr(data, "_copy", slow)
    threads = [threading.Thread(target=data._copy_or_itself, args=(path,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_copy_that_was_interrupted_is_made_anew(shared: Path, place: Path) -> None:
    (path,) = submitted("train.npz").stage or ()
    cache = place / f"freetrain-{os.getuid()}"
    (cache / f".data-{path.key}.part").mkdir(parents=True)
    cache.chmod(0o700)
    assert NodeCopies.local(path).read_bytes() == b"x" * 1000
    assert list(cache.glob(".*")) == []


def test_the_last_pilot_removes_a_copy_in_memory(
    shared: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other one; a copy on a disk stays for the next block."""
    (path,) = submitted("train.npz").stage or ()
    pool = tmp_path / "pool"
    pool.mkdir()
    monkeypatch.setattr(data, "pool_directory", lambda: pool)
    monkeypatch.setattr(data, "file_system_of", lambda path: "tmpfs")
    copy = NodeCopies.local(path)
    assert (pool / pilot.NODE_FILES_OF_POOL).read_text("utf-8") == f"{copy.parent}\n"
    pilot.remove_node_files(pool)
    assert copy.exists(), "this process uses it"
    let_go(copy.parent.name)
    pilot.remove_node_files(pool)
    assert [entry.name for entry in copy.parent.parent.iterdir()] == ["data.lock"]


def test_clean_removes_what_nobody_uses(shared: Path, place: Path) -> None:
    copy = local_path("train.npz", submitted("train.npz"))
    NodeCopies.clean()
    assert copy.exists()
    let_go(copy.parent.name)
    NodeCopies.clean()
    assert not copy.exists()
