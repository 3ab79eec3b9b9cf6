"""The driver's side: decides whether nodes start from an image, has it made, and learns what it lacks."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from freetrain_parsl.executor.htex.node_start import NodeStart
from freetrain_parsl.executor.slot.loaded_files import unpack_files
from freetrain_parsl.extensions.staging.file_systems import file_system_of, is_shared
from freetrain_parsl.extensions.staging.image import LARGE
from freetrain_parsl.extensions.staging.make import facts_of, learned_path, read_learned, write_learned
from freetrain_parsl.interpreters import module_command
from freetrain_parsl.texts import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from freetrain_parsl.protocol.messages import Hello

logger = logging.getLogger(__name__)

__all__ = ["ImageStart", "cache_directory"]

_ANY: Final = 1 << 40  # bytes: no library is as large
_LONG: Final = 3.0  # seconds that imports wait for files, of about 3 that they take on a local disk
_PAUSE: Final = 60.0  # seconds between two images of a run
_LOOK: Final = 5.0  # seconds for which the files that an image was made of are taken to be the same
_LIMIT: Final = 600.0  # seconds to make one
_BYTES_PER_SECOND: Final = 5e9  # that the nodes of a block read together; large sites have more
_LONGEST_SPREAD: Final = 30.0  # seconds
_MANY: Final = 3  # nodes without an image, while no node has one: their common cause is not on one of them
_MOST_LEARNED: Final = 20_000  # files
_PLAIN_WORD: Final = re.compile(r"[\w@%+=:,./~-]+")  # as of run directories
_IN_IMAGE: Final = re.compile(r"/freetrain-\d+/image-[0-9a-f]{64}/")


@dataclass(frozen=True)
class _Made:
    """An image that nodes can start from, as `make` describes it."""

    path: Path
    bytes: int
    packed: int
    traced: frozenset[str]
    trees: tuple[tuple[str, str], ...]
    prefix: str
    checks: tuple[tuple[Any, ...], ...]

    def changed(self) -> str:
        """Return what has changed since it was made, empty: nothing."""
        return next((str(path) for path, *facts in self.checks if facts_of(path) != [path, *facts]), "")

    def missing(self, files: Iterable[str]) -> set[str]:
        """Return which of the files that a node has loaded are not in the image, under their shared names."""
        found = set()
        for file in files:
            if (inside := _IN_IMAGE.search(file)) is not None:
                name = file[inside.end() :]
                if name not in self.traced:
                    found.update(next(([path] for path in self._shared(name) if os.path.isfile(path)), []))
                continue
            located = next((f"{name}{file[len(tree) :]}" for tree, name in self.trees if _is_in(file, tree)), None)
            if located is None:
                if file.endswith(".py") and file not in self.traced:
                    found.add(file)
            elif located.lstrip("/") not in self.traced:
                found.add(file)
        return found

    def _shared(self, name: str) -> Iterable[str]:
        """Yield the names that an entry of the image may have in the shared trees, as the image prefers them."""
        for tree, inside in sorted(self.trees, key=lambda item: item[0] != self.prefix):
            if name.startswith(f"{inside}/" if inside else ""):
                yield os.path.join(tree, name.removeprefix(f"{inside}/"))


def _is_in(file: str, tree: str) -> bool:
    return file.startswith(f"{tree}/")


class ImageStart(NodeStart):
    """Lets the nodes of one executor start from an image; see `NodeStart`."""

    def __init__(self, choice: str, python: str) -> None:
        self._choice, self._python = choice, python
        self._cache = cache_directory()
        self._directory = Path()
        self._tasks: queue.SimpleQueue[bytes | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="freetrain-image", daemon=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._made: _Made | None = None
        self._wanted = self._closed = self._off = False
        self._said: set[str] = set()
        self._without: set[str] = set()
        self._any_works = False
        self._looked_at = -_LOOK

    def begin(self, directory: Path) -> bool:
        """Make the image in the background if nodes need it; return whether they do."""
        self._directory = directory
        if not Path(self._python).is_absolute() or not Path(self._python).exists():
            if self._choice != "auto":
                self._say(f"node_image: {self._python} is not an interpreter of this host, so there is no image of it")
            self._off = True
            return False
        kind = next((kind for path in _trees_of(self._python) if is_shared(kind := file_system_of(path))), "")
        if self._choice != "auto":
            self._want(f"node_image is {self._choice!r}")
        elif kind:
            self._want(f"the environment is on a file system {kind}")
        return self._wanted

    def _want(self, why: str) -> None:
        self._wanted = True
        logger.info("an image of the Python environment is made for the nodes: %s", why)
        self._thread.start()
        self._tasks.put("make")

    def words(self, nodes: int) -> Sequence[str]:
        """Return the words that start a node from the image, once it is there."""
        made = self._made
        if made is None or self._off:
            return ()
        if changed := self._changed(made):
            logger.info("%s has changed: blocks start without an image until there is a new one", changed)
            self._made = None
            self._tasks.put("make")
            return ()
        spread = 0.0 if nodes == 1 else min(made.packed * nodes / _BYTES_PER_SECOND, _LONGEST_SPREAD)
        script = str(self._directory / _SCRIPT.name)
        words = ("/bin/bash", script, str(made.path), str(made.bytes), f"{spread:.2f}", self._python)
        if odd := next((word for word in words if not _PLAIN_WORD.fullmatch(word)), None):
            self._say(f"blocks start without an image: the name {odd!r} would need quotes in a script")
            self._off = True
            return ()
        return words

    def _changed(self, made: _Made) -> str:
        """Return what has changed since an image was made, for the blocks of a burst once."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK:
            return ""
        self._looked_at = now
        return made.changed()

    def preparation(self, nodes: int, system: str) -> str:
        """Return the command that sends the image to all nodes of a block by Slurm's own network of daemons."""
        made = self._made
        if made is None or nodes == 1 or system != "slurm":
            return ""
        there = f"/tmp/freetrain-{os.getuid()}-{made.path.name}"  # noqa: S108 - its owner and hash are checked there
        return f"command -v sbcast >/dev/null && timeout 60 sbcast --force {made.path} {there} 2>/dev/null || true"

    def started(self, hello: Hello) -> str:
        """Count starts with and without an image; want one if imports wait long for files."""
        self._any_works |= bool(hello.image)
        if hello.image_fault:
            first, known = hello.image_fault not in self._said, hello.node in self._without
            self._without.add(hello.node)
            if first:
                self._said.add(hello.image_fault)
                logger.warning("node %s starts without an image: %s", hello.node, hello.image_fault)
            if len(self._without) >= _MANY and not self._any_works and not self._off:
                self._off = True
                logger.warning("no node could start from the image: further blocks start without it")
            return "" if known else hello.image_fault
        if hello.waited > _LONG and not (self._wanted or self._off or hello.image):
            self._want(f"imports on node {hello.node} have waited {hello.waited:.0f} s for files")
        return ""

    def learn(self, files: bytes) -> None:
        """Note what a node has loaded for the next image."""
        if self._wanted:
            self._tasks.put(files)

    def close(self) -> None:
        """End the process that makes an image, and remove the run's copy."""
        self._closed = True
        self._tasks.put(None)
        if (process := self._process) is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
        if self._thread.ident is not None:
            self._thread.join(_LIMIT)
            shutil.rmtree(self._directory, ignore_errors=True)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)

    # The thread.

    def _work(self) -> None:
        made_at, due = -_PAUSE, False
        while not self._closed:
            try:
                task = self._tasks.get(timeout=max(0.0, made_at + _PAUSE - time.monotonic()) if due else None)
                due |= self._take(task) if isinstance(task, bytes) else task is not None
                if task != "make":
                    continue
            except queue.Empty:
                pass
            due, made_at = False, time.monotonic()
            try:
                self._made = self._make()
            except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
                if not self._closed:
                    self._say(f"there is no image of the Python environment, nodes start without: {text_of(error)}")
            else:
                made = self._made
                logger.info("%s: %.0f MB, %.0f MB unpacked", made.path, made.packed / 1e6, made.bytes / 1e6)

    def _take(self, payload: bytes) -> bool:
        """Note files that the image lacks; return whether there are any."""
        made = self._made
        if made is None:
            return False
        try:
            new = made.missing(unpack_files(payload))
            path = learned_path(self._cache, made.trees)
            known = set(read_learned(path))
            if not new - known or len(known | new) > _MOST_LEARNED:
                return False
            write_learned(path, known | new)
        except (OSError, ValueError) as error:
            self._say(f"what the image lacks is not noted: {text_of(error)}")
            return False
        logger.info("a training job has loaded %d files that are not in the image; the next one has them", len(new))
        return True

    def _make(self) -> _Made:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(_SCRIPT, self._directory / _SCRIPT.name)
        command = module_command("freetrain_parsl.extensions.staging.make", self._python)
        self._process = process = subprocess.Popen(
            [*command, str(self._cache), str(self._directory), str(_ANY if self._choice == "full" else LARGE)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            said, complained = process.communicate(timeout=_LIMIT)
        finally:
            with suppress(ProcessLookupError):  # also what it has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._process = None
        if process.returncode:
            lines = complained.decode(errors="replace").strip().splitlines()
            raise ValueError(lines[-1] if lines else f"exit code {process.returncode}")
        made = json.loads(said)
        return _Made(
            self._directory / made["image"],
            made["bytes"],
            made["packed"],
            frozenset(made["traced"]),
            tuple((tree, name) for tree, name in made["trees"]),
            made["prefix"],
            tuple(map(tuple, made["checks"])),
        )


_SCRIPT: Final = Path(__file__).with_name("start.sh")


def cache_directory() -> Path:
    """Return the directory of this user's images, by the XDG specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return root / "freetrain" / "images"


def _trees_of(python: str) -> list[str]:
    """Return where the files of an interpreter are: of its environment, and of the one that that was made from."""
    return [os.path.dirname(os.path.abspath(python)), os.path.dirname(os.path.realpath(python))]
