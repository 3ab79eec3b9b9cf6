"""What a node does before its command: the script that unpacks an image, with a small one."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from freetrain_parsl.executor.slot import pilot
from freetrain_parsl.extensions.staging import start
from tests.small_disk import fill, small_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(start.__file__).with_name("start.sh")
SHARED = "/shared/bin/python"
SAY = 'echo "$0 $FREETRAIN_IMAGE|$FREETRAIN_IMAGE_FAULT"'


@dataclass
class Node:
    """A node with places for images."""

    image: Path
    place: Path
    size: int = 1 << 20
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *command: str, spread: str = "0") -> subprocess.Popen[str]:
        """Start a command as a block does."""
        words = command or ("/bin/sh", "-c", SAY, SHARED)
        environment = {"PATH": os.environ["PATH"], "FREETRAIN_IMAGE_PLACES": str(self.place), **self.environment}
        return subprocess.Popen(
            [SCRIPT, str(self.image), str(self.size), spread, SHARED, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, *command: str) -> tuple[str, str]:
        """Return what the command and the script have said."""
        out, error = self.start(*command).communicate(timeout=60)
        return out.strip(), error.strip()

    @property
    def cache(self) -> Path:
        """The user's directory in the place."""
        return self.place / f"freetrain-{os.getuid()}"

    @property
    def unpacked(self) -> Path:
        """The image there."""
        return self.cache / self.image.name.removesuffix(".tar.gz")


def make_image(directory: Path, text: str = "#!/bin/sh\necho image python\n", size: int = 0) -> Path:
    """Write an image with an interpreter that says so."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content, mode in (("bin/python", text.encode(), 0o700), ("data", os.urandom(size), 0o600)):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("elsewhere")
        link.type, link.linkname = tarfile.SYMTYPE, "/usr/share"
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("image.json"))
    image = directory / f"image-{hashlib.sha256(buffer.getvalue()).hexdigest()}.tar.gz"
    image.write_bytes(buffer.getvalue())
    return image


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Return a node with a place on the test's disk."""
    (tmp_path / "place").mkdir()
    return Node(make_image(tmp_path), tmp_path / "place")


def test_the_interpreter_is_replaced_and_the_rest_of_the_command_stays(node: Node) -> None:
    out, error = node.run(SHARED, "-c", SHARED)
    assert out == "image python"
    assert error == f"freetrain: {node.unpacked.name} was unpacked in {node.cache}"
    assert (node.unpacked / "elsewhere").readlink() == Path("/usr/share")
    assert node.run() == (f"{node.unpacked}/bin/python {node.unpacked}|", ""), "the second one does not unpack"
    assert node.cache.stat().st_mode & 0o777 == 0o700
    assert node.unpacked.stat().st_mode & 0o077 == 0


def test_of_pilots_that_start_at_the_same_time_one_unpacks(node: Node) -> None:
    node.image = make_image(node.image.parent, size=8 << 20)
    said = [process.communicate(timeout=60) for process in [node.start() for _ in range(8)]]
    assert {out.strip() for out, _ in said} == {f"{node.unpacked}/bin/python {node.unpacked}|"}
    assert sum("was unpacked" in error for _, error in said) == 1


def test_the_path_of_the_user_is_searched_by_the_command_only(node: Node, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    for name in ("tar", "stat", "cp"):
        (fake / name).write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
        (fake / name).chmod(0o755)
    node.environment["PATH"] = f"{fake}:{os.environ['PATH']}"
    out, _ = node.run("/bin/sh", "-c", "command -v tar")
    assert out == str(fake / "tar")
    assert node.unpacked.is_dir()


def assert_plain(node: Node, reason: str, out: str | None = None, error: str | None = None) -> None:
    """Check that a node starts by the command alone, says so once, and leaves nothing behind."""
    if out is None or error is None:
        out, error = node.run()
    fault = out.partition("|")[2]
    assert out.partition("|")[0] == f"{SHARED} "
    assert reason in fault
    assert error.splitlines()[-1] == f"freetrain: this node starts without an image: {fault}"
    assert not node.unpacked.exists()
    assert list(node.cache.glob(".part*")) == []


def test_a_damaged_image_is_not_unpacked(node: Node) -> None:
    content = bytearray(node.image.read_bytes())
    content[len(content) // 2] ^= 1
    node.image.write_bytes(content)
    assert_plain(node, "is damaged")


def test_an_image_that_is_gone(node: Node) -> None:
    node.image.unlink()
    assert_plain(node, "could not be copied")


def test_a_place_without_room(node: Node) -> None:
    node.size = 1 << 60
    assert_plain(node, "free")


def test_a_disk_that_is_full_while_it_is_unpacked(node: Node, tmp_path: Path) -> None:
    node.image = make_image(tmp_path, size=3 << 20)
    with small_disk(tmp_path / "small", "4m") as disk:
        node.place, node.size = disk, 1 << 10
        assert_plain(node, "could not be unpacked")
        fill(disk / "full")
        assert_plain(node, "")


def test_a_place_that_may_not_hold_programs(node: Node, tmp_path: Path) -> None:
    with small_disk(tmp_path / "noexec", "8m") as disk:
        subprocess.run(["mount", "-o", "remount,noexec", str(disk)], check=True)
        node.place = disk
        assert_plain(node, "may not hold programs")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_at_its_place(node: Node) -> None:
    node.cache.mkdir(mode=0o700)
    os.chown(node.cache, 12345, -1)
    assert_plain(node, "is not a private directory of this user")


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_directory_that_others_may_write_at_its_place(node: Node, tmp_path: Path, kind: str) -> None:
    if kind == "open":
        node.cache.mkdir()
        node.cache.chmod(0o777)
    else:
        (tmp_path / "theirs").mkdir(mode=0o700)
        node.cache.symlink_to(tmp_path / "theirs")
    assert_plain(node, "is not a private directory of this user")


def test_the_next_place_is_used_if_the_first_does_not_suit(node: Node, tmp_path: Path) -> None:
    (tmp_path / "first" / f"freetrain-{os.getuid()}").mkdir(parents=True, mode=0o777)
    (tmp_path / "first" / f"freetrain-{os.getuid()}").chmod(0o755)
    node.environment["FREETRAIN_IMAGE_PLACES"] = f"{tmp_path / 'first'}:{tmp_path / 'absent'}:{node.place}"
    assert node.run()[0] == f"{node.unpacked}/bin/python {node.unpacked}|"


def test_what_a_killed_pilot_has_left_is_replaced(node: Node) -> None:
    node.run("/bin/true")
    node.unpacked.rename(node.cache / "image-1.7.part")  # a pilot that was killed while it removed it
    (node.cache / ".part").mkdir()
    (node.cache / ".part.gz").write_bytes(b"half")
    assert node.run()[0] == f"{node.unpacked}/bin/python {node.unpacked}|"
    assert sorted(path.name for path in node.cache.iterdir()) == [node.unpacked.name, "lock"]


def test_a_killed_unpacker_does_not_stop_the_next_one(node: Node) -> None:
    first = node.start(spread="60")  # it sleeps with the lock
    while not (node.cache / "lock").exists():
        time.sleep(0.01)
    time.sleep(0.2)
    with first:
        first.kill()
    assert "was unpacked" in node.run()[1]


def test_images_that_nothing_used_for_a_day_are_removed_with_the_next_one(node: Node, tmp_path: Path) -> None:
    node.run("/bin/true")
    old, used = node.unpacked, None
    node.image = make_image(tmp_path, "#!/bin/sh\necho used\n")
    used = node.unpacked
    with node.start("/bin/sh", "-c", "echo started; read line") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        for path in (old, used):
            os.utime(path, (1, 1))
        node.image = make_image(tmp_path, "#!/bin/sh\necho new\n")
        node.run("/bin/true")
        holder.kill()
    assert not old.exists()
    assert used.exists(), "a pilot uses it"


def test_what_slurm_has_sent_is_used_and_removed(node: Node) -> None:
    sent = Path(f"/tmp/freetrain-{os.getuid()}-{node.image.name}")
    node.image.rename(sent)
    try:
        assert node.run()[0] == f"{node.unpacked}/bin/python {node.unpacked}|"
        assert not sent.exists()
    finally:
        sent.unlink(missing_ok=True)


def test_a_home_of_python_in_the_environment(node: Node) -> None:
    node.environment["PYTHONHOME"] = "/opt/python"
    assert_plain(node, "PYTHONHOME is set")


@pytest.fixture
def shared_files(tmp_path: Path) -> Iterator[Path]:
    """Return a directory of files that pilots share."""
    directory = tmp_path / "image"
    directory.mkdir()
    (directory / "file").touch()
    return directory


def test_the_last_pilot_removes_what_they_share(shared_files: Path, monkeypatch) -> None:
    import fcntl

    locks = [os.open(shared_files, os.O_RDONLY) for _ in range(2)]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_SH)
    monkeypatch.setenv(pilot.NODE_FILES, f"{locks[0]}:{shared_files}")
    pilot.remove_node_files(shared_files.parent)
    assert shared_files.exists(), "the other one uses it"
    os.close(locks[0])
    monkeypatch.setenv(pilot.NODE_FILES, f"{locks[1]}:{shared_files}")
    pilot.remove_node_files(shared_files.parent)
    assert list(shared_files.parent.iterdir()) == []
    os.close(locks[1])


def test_memory_is_given_back_by_the_last_pilot(node: Node, tmp_path: Path) -> None:
    """Only there: on a disk, the next block finds the image."""
    assert node.run("/bin/sh", "-c", "echo $FREETRAIN_NODE_FILES")[0] == ""
    with small_disk(tmp_path / "memory", "8m") as disk:
        node.place = disk
        assert node.run("/bin/sh", "-c", "echo $FREETRAIN_NODE_FILES")[0] == f"8:{node.unpacked}"
        assert (
            node.run("/bin/sh", "-c", f"test /proc/$$/fd/8 -ef {node.unpacked} && echo it is open")[0] == "it is open"
        )
